"""A rate over the size of what moves."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """A rate over transfer size, or over rows: ``points`` are (bytes or rows, GB/s), ascending."""

    points: tuple[tuple[int, float], ...]

    def at(self, size: float) -> float:
        """GB/s at ``size``: linear in log(size) between points, held flat outside them."""
        sizes = [p[0] for p in self.points]
        i = bisect_left(sizes, size)
        if i == 0:
            return self.points[0][1]
        if i == len(sizes):
            return self.points[-1][1]
        (x0, y0), (x1, y1) = self.points[i - 1], self.points[i]
        t = (math.log(size) - math.log(x0)) / (math.log(x1) - math.log(x0))
        return y0 + t * (y1 - y0)

    @property
    def peak(self) -> float:
        """The highest rate of the curve, GB/s."""
        return max(rate for _, rate in self.points)
