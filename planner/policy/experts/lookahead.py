"""Weigh what the coming layer's own router says of the token's hidden state now, beside all that ``mix`` weighs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.policy.experts.base import AheadScores
from planner.policy.experts.mix import Evidence, LayerRecord, MixPolicy

LEAST_SCORE = 1e-4
"""A score below it counts as this much, so that logarithms of scores do not fall without end."""

STEEPNESS = 3.0
"""Of the slope from what a router leaves out to what it chooses: beyond a margin of 0.7, a score twice the middle, it is nearly level."""

FIRST_WEIGHTS = (1.2, 0.4, 0.8, -0.5)
"""Of a score's margin, side and slope, and of mix's odds where there are scores: before anything was seen, what a router scores highest
is likely, as it is in a model whose layers each add little to the hidden state."""


class LookaheadPolicy(MixPolicy):
    """Keeps what ``mix`` keeps. For fetching, the scores of the coming layer's router are further evidence, weighed as mix weighs its own
    and by weights that all layers share: probabilities, however good the router's foresight is.

    A score's *margin* is its logarithm above the middle of those of the ``top_k``-th score and the next, its *side* the margin's sign, and
    its *slope* lies between: tanh(STEEPNESS x margin). A router that is always right is believed by the side, one that errs where scores
    are close by the slope. None depends on the scores' scale, and all are 0 where scores are alike. Where there are scores mix's odds
    count for less, by a weight of their own, so that the first layer, which no router foresees, goes on by all of them.
    """

    needs_ahead: AheadScores | None = AheadScores.router

    def __init__(self, layers: int, count: int, top_k: int):
        super().__init__(layers, count, top_k, FIRST_WEIGHTS)
        self._last_layer = layers - 1
        self._scores: np.ndarray | None = None
        self._least = np.full(count, LEAST_SCORE, np.float32)
        self._steepness = np.full(count, STEEPNESS, np.float32)
        self._ranked = np.empty(count, np.float32)
        self._outside, self._inside = max(count - top_k - 1, 0), count - top_k

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        if layer == self._last_layer:
            ahead = None
        elif ahead is None:
            raise ValueError(f"layer {layer}: no scores of the layer ahead, which the policy needs ({self.needs_ahead})")
        self._scores = ahead
        super().observe(layer, experts)

    def study(self, layer: int, routed: np.ndarray) -> None:
        self._scores = None
        super().study(layer, routed)

    def _gather(self, now: Evidence, here: LayerRecord, coming: LayerRecord) -> None:
        super()._gather(now, here, coming)
        margin, side, slope, odds = now.further
        if self._scores is None:
            for row in now.further:
                row.fill(0)
            return
        np.maximum(self._scores, self._least, out=margin)
        np.log(margin, out=margin)
        ranked = self._ranked
        ranked[:] = margin
        ranked.sort()
        margin -= 0.5 * (ranked.item(self._outside) + ranked.item(self._inside))
        np.sign(margin, out=side)
        np.multiply(margin, self._steepness, out=slope)
        np.tanh(slope, out=slope)
        odds[:] = now.prior
