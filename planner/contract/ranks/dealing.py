"""Which rank has which layers, and which rows of the LM head."""

from __future__ import annotations

from dataclasses import dataclass

ROWS_TOGETHER = 128
"""Rows of the LM head are dealt in groups of so many, where there are enough."""


@dataclass(frozen=True)
class Dealing:
    """``layers`` layers dealt cyclically over ``count`` ranks: layer i lies with rank i mod count.

    At batch 1 layers are computed one after the other. Neighbours lie with different ranks, so while one layer computes every other rank's
    link brings its next ones, all the time.
    """

    count: int
    layers: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.layers:
            raise ValueError(f"{self.layers} layers over {self.count} ranks: each rank needs one")

    def of(self, rank: int) -> tuple[int, ...]:
        """The layers of ``rank``, by their numbers in the whole model."""
        return tuple(range(rank, self.layers, self.count))

    def owner(self, layer: int) -> int:
        """The rank that has ``layer`` of the whole model."""
        return layer % self.count

    def local(self, layer: int) -> int:
        """The number of that layer among its rank's."""
        return layer // self.count

    def vocab_rows(self, rank: int, vocab: int) -> range:
        """The rows of an LM head of ``vocab`` rows that ``rank`` multiplies by. ValueError where there are fewer rows than ranks."""
        if vocab < self.count:
            raise ValueError(f"{vocab} rows of the LM head over {self.count} ranks: each rank needs one")
        together = ROWS_TOGETHER if vocab >= ROWS_TOGETHER * self.count else 1
        groups = -(-vocab // together)
        first, last = (min(vocab, (groups * r + self.count - 1) // self.count * together) for r in (rank, rank + 1))
        return range(first, last)
