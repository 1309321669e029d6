"""Weigh what the coming layer's own router says of the token's hidden state now, beside all that ``mix`` weighs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores
from penstock.planner.contract.experts.policies.mix import MixPolicy

FIRST_WEIGHTS = (1.0, 0.4, 0.8, -0.5)
"""First weights of a score's margin, side and slope, and of mix's odds where there are scores. Before any evidence a router's highest
scores are likely: in most models each layer adds little to the hidden state."""


class LookaheadPolicy(MixPolicy):
    """Keeps what ``mix`` keeps. For fetching, the scores of the coming layer's router are further evidence. They are weighed like mix's
    evidence, by weights that all layers share. So the result is a probability, however good the router's foresight is.

    Three features of a score, none of which depends on the scores' scale, all 0 where scores are alike:

    * *margin*: its logarithm to base 2, less the middle of those of score ``top_k`` and the next one;
    * *side*: the margin's sign; it suits a router that is always right;
    * *slope*: tanh(margin); it suits a router that errs where scores are close.

    With scores, mix's odds have a smaller weight of their own. No router foresees the first layer, which keeps the whole of mix's odds.
    """

    needs_ahead: AheadScores | None = AheadScores.router

    def __init__(self, layers: int, count: int, top_k: int):
        super().__init__(layers, count, top_k, FIRST_WEIGHTS)
        self._last_layer = layers - 1
        self._scores = np.zeros(count, np.float32)
        self._scores_place = ctypes.c_void_p(self._scores.ctypes.data)

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        if layer == self._last_layer:
            return self._visit(layer, experts, None)
        if ahead is None:
            raise ValueError(f"layer {layer}: no scores of the layer ahead, which the policy needs ({self.needs_ahead})")
        self._scores[:] = ahead
        self._visit(layer, experts, self._scores_place)
