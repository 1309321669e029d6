"""Which rank has which layers, and which rows of the LM head."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from penstock.planner.contract.given.dealt import ExpertShare

ROWS_TOGETHER = 128
"""Rows of the LM head are dealt in groups of so many, where there are enough."""


@dataclass(frozen=True)
class Dealing:
    """``counts`` of layers, of each rank. Who has which follows from them: see :attr:`owners`."""

    counts: tuple[int, ...]
    share: ExpertShare = ExpertShare.whole
    """Of routed experts."""

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise ValueError(f"{self.layers} layers over {len(self.counts)} ranks, as {self.counts}: each rank needs one")

    @classmethod
    def even(cls, count: int, layers: int, share: ExpertShare = ExpertShare.whole) -> Dealing:
        """Of ``layers`` as many to each of ``count`` ranks, one more to the first ones of them: layer i lies with rank i mod count."""
        return cls(tuple(len(range(rank, layers, count)) for rank in range(count)), share)

    @property
    def count(self) -> int:
        """Of ranks."""
        return len(self.counts)

    @property
    def slices(self) -> int:
        """Of each routed expert."""
        return self.count if self.share is ExpertShare.sliced else 1

    @property
    def layers(self) -> int:
        """Of the whole model."""
        return sum(self.counts)

    @property
    def is_even(self) -> bool:
        """Whether it is what :meth:`even` deals."""
        most, least = self.counts[0], self.counts[-1]
        return most - least <= 1 and list(self.counts) == sorted(self.counts, reverse=True)

    @property
    def spares_first(self) -> bool:
        """Whether the first rank has no more layers than any other, and the others as many each but for one: what else lies with the first
        takes the place of layers."""
        first, *others = self.counts
        return bool(others) and first <= min(others) >= max(others) - 1

    def sparing(self, first: int) -> Dealing:
        """The same with ``first`` layers of the first rank, no more than it has. The others get the rest of them: as many each where layers
        are dealt evenly, else in proportion to what they have."""
        counts, parts = list(self.counts), (1,) * self.count if self.is_even else self.counts
        for _ in range(counts[0] - first):
            counts[min(range(1, self.count), key=lambda rank: (counts[rank] + 0.5) / parts[rank])] += 1
        return Dealing((first, *counts[1:]), self.share)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The rank of each layer, in their order.

        Layers are computed one after the other, and while one is computed every other rank's link brings its next ones. So a rank's layers
        are spread evenly: of L layers, the k-th of a rank that has c of them is due at (k + 1/2) * L / c, and what is due first comes
        first, of those due together the first rank's. Rank 0, which looks up tokens, has the first layer. No rank has neighbours where no
        rank has more than half of all layers, as a rule. Of ranks that have as many, layer i lies with rank i mod count.
        """
        left, owners, layers = list(self.counts), list[int](), self.layers
        may_avoid = max(self.counts) * 2 <= layers + 1
        for remaining in range(layers, 0, -1):
            free = [rank for rank, more in enumerate(left) if more] if owners else [0]
            if may_avoid and len(free) > 1:
                urgent = [rank for rank in free if left[rank] * 2 > remaining]
                free = urgent or [rank for rank in free if rank != owners[-1]]
            # due at (k + 1/2) * L / c, of which L is the same for all
            owner = min(free, key=lambda rank: (2 * (self.counts[rank] - left[rank]) + 1) / self.counts[rank])
            left[owner] -= 1
            owners.append(owner)
        return tuple(owners)

    @cached_property
    def _of(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(layer for layer, owner in enumerate(self.owners) if owner == rank) for rank in range(self.count))

    def of(self, rank: int) -> tuple[int, ...]:
        """The layers of ``rank``, by their numbers in the whole model."""
        return self._of[rank]

    def owner(self, layer: int) -> int:
        """The rank that has ``layer`` of the whole model."""
        return self.owners[layer]

    def local(self, layer: int) -> int:
        """The number of that layer among its rank's."""
        return bisect_left(self.of(self.owner(layer)), layer)

    def stride(self, rank: int) -> int:
        """Layers from one of ``rank``'s to its next one, at most; ``count`` where it has one alone."""
        mine = self.of(rank)
        return max((after - before for before, after in zip(mine, mine[1:], strict=False)), default=self.count)

    @property
    def ways(self) -> tuple[tuple[int, int], ...]:
        """The ranks between which hidden states go from a layer to the next one, and back to the first one: from, to."""
        round_all = [(rank, (rank + 1) % self.count) for rank in range(self.count)]
        between = ((one, other) for one, other in zip(self.owners, self.owners[1:], strict=False) if one != other)
        return tuple(dict.fromkeys([*round_all, *between]))

    def vocab_rows(self, rank: int, vocab: int) -> range:
        """The rows of an LM head of ``vocab`` rows that ``rank`` multiplies by: as many as others, or in proportion to layers where
        these are uneven. ValueError where there are too few rows."""
        parts = (1,) * self.count if self.is_even else self.counts
        whole = sum(parts)
        if vocab < whole:
            raise ValueError(f"{vocab} rows of the LM head over {self.count} ranks: each rank needs one")
        together = ROWS_TOGETHER if vocab >= ROWS_TOGETHER * whole else 1
        groups = -(-vocab // together)
        first, last = (min(vocab, -(-groups * sum(parts[:r]) // whole) * together) for r in (rank, rank + 1))
        return range(first, last)
