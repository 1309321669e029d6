"""What routers of layers beyond the next one say of today's hidden state, and how often they were right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

SCORES = 256
"""Scores of coming layers that are taken in one layer, at most: of 32 layers with 8 experts, of 2 with 128; of one layer always."""

PRIOR_VISITS = 4.0
"""Visits that each rank at each distance counts as having had, half of which used its expert."""


def reach(layers: int, count: int) -> int:
    """How many MoE layers ahead scores are taken, of ``count`` experts each."""
    return min(layers - 1, max(1, SCORES // count))


class FarSight:
    """Names, of each layer beyond the next one, the ``top_k`` experts that its own router scores highest for the token's hidden state now.

    The chance of a name is the share of visits that used the expert named at that rank and that many layers before: counted over all
    layers, since near the last ones few are left to count. What it says of the next layer is the policies' own to judge. O(layers x
    experts) a visit, in some ten numpy calls.
    """

    def __init__(self, layers: int, count: int, top_k: int):
        self._layers, self._top_k = layers, top_k
        self._distances = np.arange(reach(layers, count) + 1)
        self._visits = np.full(len(self._distances), PRIOR_VISITS)
        self._right = np.full((len(self._distances), top_k), PRIOR_VISITS / 2)
        self._named = np.zeros((layers, len(self._distances), top_k), np.intp)
        self._told = np.zeros((layers, len(self._distances)))
        """1 where a layer's next visit was spoken of from so many layers before it."""
        self._used = np.zeros(count)

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None) -> None:
        """A decode step was routed to ``experts`` in ``layer``; ``ahead`` [layers, experts] are scores of the layers after it, nearest
        first."""
        self._used.fill(0)
        self._used[experts] = 1
        told = self._told[layer]
        self._visits += told
        self._right += self._used[self._named[layer]] * told[:, None]
        told.fill(0)
        if ahead is not None and len(ahead) > 1:
            far = self._distances[2 : len(ahead) + 1]
            self._named[layer + far, far] = (-ahead[1:]).argsort(axis=1, kind="stable")[:, : self._top_k]
            self._told[layer + far, far] = 1

    def forget(self) -> None:
        """A prompt passes: what was named before it is void."""
        self._told.fill(0)

    def named(self, layer: int, most: int) -> Iterator[tuple[int, int, float]]:
        """(layer, expert, chance) of up to ``most`` experts of each layer beyond the one after ``layer``, which was observed last: the
        nearest layer first, and of it the likeliest."""
        for distance in range(2, min(len(self._distances), self._layers - layer)):
            if not self._told[layer + distance, distance]:
                return
            visits = self._visits[distance]
            for rank, expert in enumerate(self._named[layer + distance, distance, :most].tolist()):
                yield layer + distance, expert, self._right[distance, rank] / visits
