"""Fetch the experts whose tokens looked like this one: the seeds' centroids of hidden states."""

from __future__ import annotations

from planner.policy.experts.ahead import AheadPolicy
from planner.policy.experts.base import AheadScores
from planner.policy.experts.lru import LruPolicy


class TrajectoryPolicy(AheadPolicy):
    """Foresees the experts whose centroids in the coming layer are nearest to the token's hidden state now; keeps what was used last."""

    def __init__(self, layers: int, count: int, top_k: int):
        super().__init__(layers, count, top_k, LruPolicy(layers, count, top_k), AheadScores.centroids)
