"""Keep what was used last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores


class LruPolicy:
    """An expert is worth the number of its layer's visit that used it last; of one visit, the likelier expert is worth more."""

    needs_ahead: AheadScores | None = None

    def __init__(self, layers: int, count: int, top_k: int):
        self._last = np.zeros((layers, count))
        self._visits = [0] * layers
        self._behind = np.arange(count) / (count + 1)
        self._none = np.zeros(count)

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        self._visits[layer] += 1
        self._last[layer][experts] = self._visits[layer] - self._behind[: len(experts)]

    def study(self, layer: int, routed: np.ndarray) -> None:
        visits = self._visits[layer] + np.arange(1, len(routed) + 1)
        np.maximum.at(self._last[layer], routed, visits[:, None] - self._behind[: routed.shape[1]])
        self._visits[layer] += len(routed)

    def worth(self, layer: int) -> np.ndarray:
        return self._last[layer]

    def foresee(self, layer: int) -> np.ndarray:
        return self._none
