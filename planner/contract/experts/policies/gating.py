"""Keep the companions of what was just used: the MoE study's gating graph (docs/origins.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores


class GatingPolicy:
    """A graph for each layer, whose edges count the tokens that used both experts. An expert is worth its edges to those just used, which
    themselves are worth the more for their own uses."""

    needs_ahead: AheadScores | None = None

    def __init__(self, layers: int, count: int, top_k: int):
        self._edges = np.zeros((layers, count, count))
        self._worth = np.zeros((layers, count))
        self._none = np.zeros(count)

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        edges = self._edges[layer]
        used = np.zeros(len(edges))
        used[experts] = 1
        edges[experts] += used
        np.add.reduce(edges[experts], axis=0, out=self._worth[layer])

    def study(self, layer: int, routed: np.ndarray) -> None:
        for first in routed.T:
            for second in routed.T:
                np.add.at(self._edges[layer], (first, second), 1)
        if len(routed):
            self._worth[layer] = self._edges[layer][routed[-1]].sum(axis=0)

    def worth(self, layer: int) -> np.ndarray:
        return self._worth[layer]

    def foresee(self, layer: int) -> np.ndarray:
        return self._none
