"""Keep and fetch what has followed the experts of this token: the MoE study's chain P[layer, expert now, expert next]."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores

PRIOR_VISITS = 1.0
"""Visits that an expert counts as having had before the first, followed by all experts alike."""


class MarkovPolicy:
    """An expert is worth the probability that the next token uses it after this one's experts, the mean of what each of those says. The
    same figure, one token later, is what it foresees."""

    needs_ahead: AheadScores | None = None

    def __init__(self, layers: int, count: int, top_k: int):
        self._follows = np.full((layers, count, count), PRIOR_VISITS * top_k / count)
        self._visits = np.full((layers, count, 1), PRIOR_VISITS)
        self._chance = np.full((layers, count), top_k / count)
        self._now: list[Sequence[int] | np.ndarray] = [()] * layers

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        before = self._now[layer]
        if len(before):
            used = np.zeros(self._chance.shape[1])
            used[experts] = 1
            self._follows[layer][before] += used
            self._visits[layer][before] += 1
        self._turn_to(layer, experts)

    def study(self, layer: int, routed: np.ndarray) -> None:
        for now in routed[:-1].T:
            for after in routed[1:].T:
                np.add.at(self._follows[layer], (now, after), 1)
            np.add.at(self._visits[layer], (now, 0), 1)
        if len(routed):
            self._turn_to(layer, routed[-1])

    def worth(self, layer: int) -> np.ndarray:
        return self._chance[layer]

    def foresee(self, layer: int) -> np.ndarray:
        return self._chance[layer]

    def _turn_to(self, layer: int, experts: Sequence[int] | np.ndarray) -> None:
        self._now[layer] = list(experts)
        rows = self._follows[layer][experts] / self._visits[layer][experts]
        np.divide(np.add.reduce(rows, axis=0), len(experts), out=self._chance[layer])
