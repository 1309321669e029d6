"""What may be fetched ahead of a layer's visit, into one tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prefetch:
    """Before each visit of a layer, its likeliest experts that are not held are fetched."""

    most: int
    """How many, at most."""
    least_chance: float = 0.0
    """The chance below which none is fetched."""


NOTHING = Prefetch(0)
