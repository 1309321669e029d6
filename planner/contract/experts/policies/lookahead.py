"""Weigh what the coming layer's own router says of the token's hidden state now, beside all that ``mix`` weighs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores
from penstock.planner.contract.experts.policies.mix import MixPolicy

FIRST_WEIGHTS = (1.0, 0.4, 0.8, -0.5)
"""Of a score's margin, side and slope, and of mix's odds where there are scores: before anything was seen, what a router scores highest
is likely, as it is in a model whose layers each add little to the hidden state."""


class LookaheadPolicy(MixPolicy):
    """Keeps what ``mix`` keeps. For fetching, the scores of the coming layer's router are further evidence, weighed as mix weighs its own
    and by weights that all layers share: probabilities, however good the router's foresight is.

    A score's *margin* is its logarithm to base 2 above the middle of those of the ``top_k``-th score and the next, its *side* the margin's
    sign, and its *slope* lies between: tanh(margin). A router that is always right is believed by the side, one that errs where scores
    are close by the slope. None depends on the scores' scale, and all are 0 where scores are alike. Where there are scores mix's odds
    count for less, by a weight of their own, so that the first layer, which no router foresees, goes on by all of them.
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
