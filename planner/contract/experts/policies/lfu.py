"""Keep what was used most of late."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores

HALF_LIFE_VISITS = 32
"""Visits of its layer after which a use counts half."""


class LfuPolicy:
    """An expert is worth its uses, each of them counting the less the longer ago it was."""

    needs_ahead: AheadScores | None = None

    def __init__(self, layers: int, count: int, top_k: int, half_life_visits: float = HALF_LIFE_VISITS):
        self._uses = np.zeros((layers, count))
        self._fade = 0.5 ** (1 / half_life_visits)
        self._none = np.zeros(count)

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        uses = self._uses[layer]
        uses *= self._fade
        uses[experts] += 1

    def study(self, layer: int, routed: np.ndarray) -> None:
        self._uses[layer] = faded(self._uses[layer], routed, self._fade)

    def worth(self, layer: int) -> np.ndarray:
        return self._uses[layer]

    def foresee(self, layer: int) -> np.ndarray:
        return self._none


def faded(uses: np.ndarray, routed: np.ndarray, fade: float) -> np.ndarray:
    """``uses`` [experts] after the visits ``routed`` [visits, top_k], before each of which what was there is multiplied by ``fade``."""
    weights = np.broadcast_to(fade ** np.arange(len(routed) - 1, -1, -1.0)[:, None], routed.shape)
    return uses * fade ** len(routed) + np.bincount(routed.ravel(), weights.ravel(), len(uses))
