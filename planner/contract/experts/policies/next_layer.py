"""Fetch what scores of the token's hidden state say, keep what another policy keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores, ExpertPolicy

PRIOR_VISITS = 4.0
"""Visits that each rank of a score counts as having had, half of which used an expert of the first ``top_k`` ranks and half any."""


class AheadPolicy:
    """Keeps what ``keeper`` keeps. An expert's chance is that of its rank among the scores: the share of the layer's visits that used the
    expert of that rank. So it is a probability, whatever the scores' scale."""

    def __init__(self, layers: int, count: int, top_k: int, keeper: ExpertPolicy, needs_ahead: AheadScores):
        self.needs_ahead: AheadScores | None = needs_ahead
        self._keeper = keeper
        prior = np.full(count, 0.5 * top_k / count)
        prior[:top_k] += 0.5
        self._right = np.tile(PRIOR_VISITS * prior, (layers, 1))
        self._visits = [PRIOR_VISITS] * layers
        self._rank: list[np.ndarray | None] = [None] * layers
        self._chance = np.zeros((layers, count))
        self._places = np.arange(count)

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        self._keeper.observe(layer, experts)
        rank = self._rank[layer]
        if rank is not None:
            self._right[layer][rank[experts]] += 1
            self._visits[layer] += 1
        if layer + 1 < len(self._rank):
            if ahead is None:
                raise ValueError(f"layer {layer}: no scores of the layer ahead, which the policy needs ({self.needs_ahead})")
            self._expect(layer + 1, ahead)

    def study(self, layer: int, routed: np.ndarray) -> None:
        self._keeper.study(layer, routed)

    def worth(self, layer: int) -> np.ndarray:
        return self._keeper.worth(layer)

    def foresee(self, layer: int) -> np.ndarray:
        return self._chance[layer]

    def _expect(self, layer: int, scores: np.ndarray) -> None:
        rank = np.empty_like(self._places)
        rank[(-scores).argsort(kind="stable")] = self._places
        self._rank[layer] = rank
        np.divide(self._right[layer][rank], self._visits[layer], out=self._chance[layer])
