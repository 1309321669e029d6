"""Visits of one token that read experts from the SSD, and visits that do not: what each takes, by how many are missed on average."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

from penstock.planner.contract.experts.visit_waits import mean_of


@dataclass(frozen=True)
class ReadingVisits:
    """Of u experts a visit misses each by itself: the share a lies in DRAM, the share b on the SSD. So k are copied and j are read, in

        u! / (k! * j! * (u - k - j)!) * a^k * b^j * (1 - a - b)^(u - k - j)

    of the visits. One that reads waits for the longer of its reads and all of its copies, one that does not for its copies alone.
    """

    each_s: float = 0.0
    """For each expert that is read: what visits that read take beyond the transit of what they read."""
    reading: float = 0.0
    """The same: how many visits read."""
    copying: float = 1.0
    """Of what visits wait for copies where none reads, the share that is left: others wait for reads meanwhile."""
    resting: float = 1.0
    """Of the visits, those that read nothing."""
    beyond_s: float = 0.0
    """Of a visit, what it waits beyond the transit of what it reads."""


@lru_cache(maxsize=512)
def reading_visits(waits: tuple[float, ...], copied: float, read: float, read_s: float, once_s: float) -> ReadingVisits:
    """``waits``: of a visit that copies 0, 1, ... u experts and reads none, seconds. ``copied`` and ``read``: a and b. A visit that reads j
    takes ``once_s`` + j * ``read_s``. O(u^2), kept for the next time."""
    asked = len(waits) - 1
    read, copied = min(max(read, 1e-9), 1.0), min(max(copied, 0.0), 1.0)
    copied = min(copied, 1.0 - read)
    beyond_s = copies_s = 0.0
    for j in range(asked + 1):
        for k in range(asked + 1 - j):
            hits = asked - j - k
            chance = comb(asked, j) * comb(asked - j, k) * read**j * copied**k * max(0.0, 1.0 - read - copied) ** hits
            if j:
                beyond_s += chance * max(once_s, waits[k + j] - j * read_s)
            else:
                copies_s += chance * waits[k]
    none, alone_s = (1 - read) ** asked, mean_of(waits, copied)
    each, copying = 1 / (asked * read), copies_s / alone_s if alone_s else none
    return ReadingVisits(beyond_s * each, (1 - none) * each, copying, none, beyond_s + copies_s)
