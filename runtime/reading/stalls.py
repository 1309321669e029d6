"""Reads that took far longer than reads here usually do: a drive that throttles, a neighbour, a failing sector."""

from __future__ import annotations

import datetime
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FACTOR = 8
"""A read that takes so many medians is a stall: a drive that slows down tenfold shows, one that is merely shared does not."""
LEAST_S = 0.01
"""Shorter reads are no stalls: schedulers alone hold a thread up for milliseconds."""
ENOUGH = 16
"""Reads after which their median means something."""
_STEPS = 8
"""Histogram bins to a doubling of time: the median is known to 9 %."""
_BINS = 320


@dataclass(frozen=True)
class Stall:
    """One read that took ``seconds``, begun at ``offset`` of ``file``, over at the local time ``when``."""

    seconds: float
    file: str
    offset: int
    when: str


class Stalls:
    """Notes every block that was read; keeps counts and the longest stall alone. Thread-safe, about 2 microseconds a read.

    ``usual_s`` is the drive's measured seconds a read. The first reads alone would be a bad measure: a cache above the drive may make them
    faster, and all others would look slow.
    """

    def __init__(self, usual_s: float = 0.0) -> None:
        self._usual_s = usual_s
        self._lock = threading.Lock()
        self._bins = [0] * _BINS
        self._reads = 0
        self._median_s = math.inf
        self.count = 0
        self.lost_s = 0.0
        """Sum over stalls of what they took beyond the median; reads overlap, so the run need not have waited as long."""
        self.longest: Stall | None = None

    def note(self, seconds: float, file: Path, offset: int) -> None:
        """A block was read from ``offset`` on."""
        with self._lock:
            self._reads += 1
            self._bins[_bin(seconds)] += 1
            if self._reads == ENOUGH or self._reads % 64 == 0:
                self._median_s = self._median()
            if seconds < LEAST_S or seconds <= FACTOR * max(self._median_s, self._usual_s):
                return
            self.count += 1
            self.lost_s += seconds - self._median_s
            if self.longest is None or seconds > self.longest.seconds:
                when = datetime.datetime.now().isoformat(timespec="seconds")
                self.longest = Stall(seconds, str(file), offset, when)

    def facts(self) -> dict[str, Any]:
        """For the report; ``longest_s``, ``file``, ``offset`` and ``when`` are those of the longest stall, None without one."""
        with self._lock:
            longest = self.longest
            return {
                "count": self.count,
                "median_s": self._median() if self._reads else None,
                "lost_s": self.lost_s,
                "longest_s": longest.seconds if longest else None,
                "file": longest.file if longest else None,
                "offset": longest.offset if longest else None,
                "when": longest.when if longest else None,
            }

    def _median(self) -> float:
        seen = 0
        for k, count in enumerate(self._bins):
            seen += count
            if 2 * seen >= self._reads:
                return 2.0 ** ((k + 0.5) / _STEPS) * 1e-9
        return math.inf


def _bin(seconds: float) -> int:
    """Bins start at a nanosecond and grow by a factor of 2 ** (1 / _STEPS)."""
    return min(_BINS - 1, max(0, int(math.log2(max(seconds, 1e-9) * 1e9) * _STEPS)))
