"""How long visits of MoE layers wait on average for the experts that they miss: some miss few, and wait for none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
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
        each = mean_of(more, odds)
        lines.append(Line(mean_of(waits, odds) - each * odds * asked, each))
    return tuple(dict.fromkeys(lines))


@lru_cache(maxsize=512)
def bent_lines(waits: tuple[float, ...], odds: float, even: float) -> tuple[Line, ...]:
    """The same of ``waits`` that are not convex, as where two of three missed experts wait for the third alone; ``even``: see
    :func:`mean_of`. The largest line is exact where the share ``odds`` is missed. From there to either side it is the largest convex curve
    that is at :data:`MISSED_AT` no more than the mean wait; where that is flatter beyond ``odds`` than before, the largest line goes on as
    it came.
    """
    asked = len(waits) - 1
    if asked < 1:
        return (Line(0.0, 0.0),)
    found = [(at * asked, mean_of(waits, at, even)) for at in sorted({*MISSED_AT, odds})]
    sides = [x for x in found if x[0] <= odds * asked], [x for x in found if x[0] >= odds * asked]
    lines = list[Line]()
    for side in sides:
        for one, other in pairwise(_below(side)):
            each = (other[1] - one[1]) / (other[0] - one[0])
            if not lines or each > lines[-1].each:
                lines.append(Line(one[1] - each * one[0], each))
    return tuple(lines)


def _below(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners of the largest convex curve that is nowhere above ``points``, which go from left to right."""
    hull = list[tuple[float, float]]()
    for x, y in points:
        while len(hull) > 1 and (y - hull[-2][1]) * (hull[-1][0] - hull[-2][0]) <= (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    return hull


def mean_of(values: Sequence[float], odds: float, even: float = 0.0) -> float:
    """Of ``values[k]``, k of Binomial(len(values) - 1, odds). Of a share ``even`` of the visits, k is the mean of that in each, and
    ``values`` are linear between whole k."""
    n = len(values) - 1
    drawn = sum(comb(n, k) * odds**k * (1 - odds) ** (n - k) * value for k, value in enumerate(values) if value)
    if not even:
        return drawn
    at = min(int(odds * n), n - 1)
    return (1 - even) * drawn + even * (values[at] + (odds * n - at) * (values[at + 1] - values[at]))
