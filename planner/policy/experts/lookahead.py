"""Fetch the experts that the coming layer's own router would choose by today's hidden state."""

from __future__ import annotations

from planner.policy.experts.ahead import AheadPolicy
from planner.policy.experts.base import AheadScores
from planner.policy.experts.mix import MixPolicy


class LookaheadPolicy(AheadPolicy):
    """Foresees what the coming layer's router scores highest on the token's hidden state now; keeps what ``mix`` keeps."""

    def __init__(self, layers: int, count: int, top_k: int):
        super().__init__(layers, count, top_k, MixPolicy(layers, count, top_k), AheadScores.router)
