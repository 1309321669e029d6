"""How long visits of MoE layers wait on average for the experts that they miss: some miss few, and wait for none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb
from typing import NamedTuple

MISSED_AT = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the asked experts that are missed, at which a line touches the mean wait."""


class Line(NamedTuple):
    """Of one visit: seconds where nothing is missed, and more for each expert missed."""

    none: float
    each: float


@lru_cache(maxsize=512)
def wait_lines(waits: tuple[float, ...]) -> tuple[Line, ...]:
    """Lines of which the largest is the mean wait of a visit that misses x of u experts on average, each by itself:

        E[waits[k]], k of Binomial(u, x / u), u = len(waits) - 1

    That is convex in x where ``waits`` are in k; then no line is above it. The largest is exact at :data:`MISSED_AT`. O(u) for each line,
    kept for the next time.
    """
    asked = len(waits) - 1
    if asked < 1:
        return (Line(0.0, 0.0),)
    more = [after - before for before, after in zip(waits, waits[1:], strict=False)]
    lines = []
    for odds in MISSED_AT:
        each = _mean(more, odds)
        lines.append(Line(_mean(waits, odds) - each * odds * asked, each))
    return tuple(dict.fromkeys(lines))


def _mean(values: Sequence[float], odds: float) -> float:
    """Of ``values[k]``, k of Binomial(len(values) - 1, odds)."""
    n = len(values) - 1
    return sum(comb(n, k) * odds**k * (1 - odds) ** (n - k) * value for k, value in enumerate(values) if value)
