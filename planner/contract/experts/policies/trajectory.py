"""Fetch the experts whose tokens looked like this one: the MoE study's centroids of hidden states."""

from __future__ import annotations

from penstock.planner.contract.experts.policies.base import AheadScores
from penstock.planner.contract.experts.policies.lru import LruPolicy
from penstock.planner.contract.experts.policies.next_layer import AheadPolicy


class TrajectoryPolicy(AheadPolicy):
    """Foresees the experts whose centroids in the coming layer are nearest to the token's hidden state now; keeps what was used last."""

    def __init__(self, layers: int, count: int, top_k: int):
        super().__init__(layers, count, top_k, LruPolicy(layers, count, top_k), AheadScores.centroids)
