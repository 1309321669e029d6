"""How a step's visits share missed experts between CPU and link, by how many they miss: figures for plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from penstock.planner.contract.experts.host_split import HostSplit
from penstock.planner.contract.given.model import Experts, touched_by_rank


class Unasked(NamedTuple):
    """Experts of a layer that are copied before its router has spoken, since the layer before it used nearly all of its own."""

    copied: float
    used: int
    """Of them by this layer."""
    beside_s: float
    """Seconds for which nothing else is copied."""


NONE_CAME = Unasked(0.0, 0, 0.0)


@dataclass(frozen=True)
class SharedVisits:
    """Of visits that miss 0, 1, 2 ... experts, all of which lie in DRAM."""

    taken: tuple[int, ...]
    """Experts that the CPU computes."""
    host_s: tuple[float, ...]
    """Seconds that these take it, while the link rests."""
    link_s: tuple[float, ...]
    """Seconds that the link takes for the others, while the CPU rests."""
    host_ends: tuple[float, ...]
    """Seconds until the CPU's results are there, the link at work or not."""
    link_ends: tuple[float, ...]
    """Seconds until the others are where they are computed."""

    @classmethod
    def copied(cls, copy_s: float, most: int, ahead: float = 0.0) -> SharedVisits:
        """Where the link brings all, and ``ahead`` of them have come unasked for."""
        nobody, each = (0,) * (most + 1), range(most + 1)
        ends = tuple(max(0.0, missed - ahead) * copy_s for missed in each)
        return cls(nobody, nobody, tuple(missed * copy_s for missed in each), nobody, ends)


NO_VISITS = SharedVisits.copied(0.0, 0)


@lru_cache(maxsize=64)
def shared_visits(split: HostSplit, rows: tuple[float, ...], most: int, came: Unasked = NONE_CAME) -> SharedVisits:
    """As ``split`` shares them, of up to ``most`` missed. ``rows``: see :func:`missed_rows`. Some of them ``came``, or come, unasked for.
    O(most^2), kept for the next time."""
    found = []
    for missed in range(most + 1):
        here = min(came.used, missed)
        share = here / came.used if came.used else 0.0
        asked, queued_s = spread_rows(rows, missed - here), share * max(0.0, came.copied * split.copy_s - came.beside_s)
        mine = split.on_host(asked, queued_s)
        theirs, copied = [asked[at] for at in mine], len(asked) - len(mine)
        host_s = sum(split.host_s[n - 1] for n in theirs)
        link_s = (share * came.copied + copied) * split.copy_s
        found.append((len(mine), host_s, link_s, *split.ends(theirs, copied, queued_s)))
    return SharedVisits(*map(tuple, zip(*found, strict=True)))


@lru_cache(maxsize=64)
def missed_rows(experts: Experts, tokens: int, kept: int, most: int) -> tuple[float, ...]:
    """[most + 1]: the shares of missed experts that 1, 2, ... ``most`` and more of ``tokens`` tokens visit, where a layer keeps ``kept``
    experts. Each token visits the expert of the n-th slot with the chance of :func:`touched_by_rank`, by itself. Those that are missed are
    the less likely ones, so most of them have few rows. O(experts * most), kept for the next time."""
    found = [0.0] * (most + 1)
    for p in touched_by_rank(experts, 1)[min(kept, experts.count - 1) :]:
        left = 1 - (1 - p) ** tokens
        for n in range(1, min(most, tokens) + 1):
            chance = math.comb(tokens, n) * p**n * (1 - p) ** (tokens - n)
            found[n - 1] += chance
            left -= chance
        found[most] += max(0.0, left)
    total = sum(found)
    return tuple(each / total for each in found) if total else (1.0, *(0.0 for _ in found[1:]))


def spread_rows(shares: Sequence[float], count: int) -> list[int]:
    """Rows of ``count`` experts, spread as ``shares`` are: the middle one of as many equal parts each."""
    ends, rows, at = [*accumulate(shares)], list[int](), 0
    for number in range(count):
        while at < len(ends) - 1 and ends[at] < (number + 0.5) / count:
            at += 1
        rows.append(at + 1)
    return rows
