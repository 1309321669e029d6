"""Keep what was used most of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores


class StaticPolicy:
    """An expert is worth the number of its uses so far, so the kept set soon stops changing."""

    needs_ahead: AheadScores | None = None

    def __init__(self, layers: int, count: int, top_k: int):
        self._uses = np.zeros((layers, count))
        self._none = np.zeros(count)

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        self._uses[layer][experts] += 1

    def study(self, layer: int, routed: np.ndarray) -> None:
        self._uses[layer] += np.bincount(routed.ravel(), minlength=self._uses.shape[1])

    def worth(self, layer: int) -> np.ndarray:
        return self._uses[layer]

    def foresee(self, layer: int) -> np.ndarray:
        return self._none
