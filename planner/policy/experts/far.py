"""What routers of layers beyond the next one say of today's hidden state, and how often they were right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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

    Only names of experts that are not held count: those that are held are right more often. A name's chance is the share of visits that
    used the expert named at that rank and that many layers before, over all layers, since near the last ones few are left to count. What
    it says of the next layer is the policies' own to judge. O(layers x experts) a visit, of which numpy does the sorting alone: beside
    other work each further kind of call costs as much as all of the rest.
    """

    def __init__(self, layers: int, count: int, top_k: int):
        self._top_k = top_k
        far = reach(layers, count) + 1
        self._visits = [[PRIOR_VISITS] * top_k for _ in range(far)]
        self._right = [[PRIOR_VISITS / 2] * top_k for _ in range(far)]
        self._told: list[dict[int, list[tuple[int, int]]]] = [{} for _ in range(layers)]
        """Of each layer's next visit: how many layers before it spoke of it, and whom that named, (rank, expert)."""

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None, held: Callable[[int, int], bool]) -> None:
        """A decode step was routed to ``experts`` in ``layer``; ``ahead`` [layers, experts] are scores of the layers after it, nearest
        first. ``held`` tells of (layer, expert)."""
        for distance, names in self._told[layer].items():
            visits, right = self._visits[distance], self._right[distance]
            for rank, name in names:
                visits[rank] += 1
                right[rank] += name in experts
        self._told[layer] = {}
        if ahead is not None and len(ahead) > 1:
            for distance, ranked in enumerate(ahead[1:].argsort(axis=1).tolist(), 2):
                coming, best = layer + distance, enumerate(ranked[: -self._top_k - 1 : -1])
                self._told[coming][distance] = [(rank, name) for rank, name in best if not held(coming, name)]

    def forget(self) -> None:
        """A prompt passes: what was named before it is void."""
        for told in self._told:
            told.clear()

    def named(self, layer: int, most: int) -> Iterator[tuple[int, int, float]]:
        """(layer, expert, chance) of up to ``most`` experts of each layer beyond the one after ``layer``, which was observed last and held
        none of them then: the nearest layer first, and of it the likeliest."""
        for distance, told in enumerate(self._told[layer + 2 :], 2):
            if distance not in told:
                return
            for rank, name in told[distance][:most]:
                yield layer + distance, name, self._right[distance][rank] / self._visits[distance][rank]
