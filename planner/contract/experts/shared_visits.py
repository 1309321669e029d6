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

    copied: int
    """The last of them is on its way when the router speaks."""
    missing: float
    """Experts of the layer that no slot keeps: a visit that misses k of them uses each that came with the same chance."""
    left_s: float
    """Of the last copy, what is left then."""
    given_up_s: float
    """Of that, what goes on of one that is not used."""


NONE_CAME = Unasked(0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class SharedVisits:
    """Of visits that miss 0, 1, 2 ... experts, all of which lie in DRAM."""

    taken: tuple[float, ...]
    """Experts that the CPU computes, on average."""
    host_s: tuple[float, ...]
    """Seconds that these take it, while the link rests."""
    link_s: tuple[float, ...]
    """Seconds that the link takes for the others, while the CPU rests."""
    host_ends: tuple[float, ...]
    """Seconds until the CPU's results are there, the link at work or not. Where some came unasked, until the others are there, too: on
    average over how many of these are used."""
    link_ends: tuple[float, ...]
    """Seconds until the others are where they are computed."""
    link_last: tuple[float, ...]
    """How likely these are the last."""

    @classmethod
    def copied(cls, copy_s: float, most: int, ahead: float = 0.0) -> SharedVisits:
        """Where the link brings all, and ``ahead`` of them have come unasked for."""
        nobody, each = (0,) * (most + 1), range(most + 1)
        ends = tuple(max(0.0, missed - ahead) * copy_s for missed in each)
        return cls(nobody, nobody, tuple(missed * copy_s for missed in each), nobody, ends, tuple(float(end_s > 0) for end_s in ends))


NO_VISITS = SharedVisits.copied(0.0, 0)


@lru_cache(maxsize=64)
def shared_visits(split: HostSplit, rows: tuple[float, ...], most: int, came: Unasked = NONE_CAME) -> SharedVisits:
    """As ``split`` shares them, of up to ``most`` missed. ``rows``: see :func:`missed_rows`. Some of them ``came``, or come, unasked for.
    O(most^2), kept for the next time."""
    return SharedVisits(*map(tuple, zip(*(_mean_visit(split, rows, missed, came) for missed in range(most + 1)), strict=True)))


def _mean_visit(split: HostSplit, rows: tuple[float, ...], missed: int, came: Unasked) -> list[float]:
    """Of visits that miss so many: a place of each field of :class:`SharedVisits`."""
    found = [0.0] * 6
    for used, chance in _used(missed, came):
        share = used / came.copied if came.copied else 0.0
        given_up_s = (1 - share) * (came.left_s - came.given_up_s)
        asked, queue_s = spread_rows(rows, missed - used), came.left_s - given_up_s
        mine = split.on_host(asked, queue_s)
        theirs, copied = [asked[at] for at in mine], len(asked) - len(mine)
        host_s = sum(split.host_s[n - 1] for n in theirs)
        link_s = (came.copied + copied) * split.copy_s - given_up_s
        ends = split.ends(theirs, copied, queue_s, used > 0)
        last_s = max(ends) if came.copied else ends[0]
        for at, value in enumerate((len(mine), host_s, link_s, last_s, ends[1], float(ends[1] > ends[0]))):
            found[at] += chance * value
    return found


def _used(missed: int, came: Unasked) -> list[tuple[int, float]]:
    """(of what came, how many a visit uses that misses so many, how likely it is): drawn without putting back. A layer that keeps a slot
    more than another one misses an expert less."""
    few, more = int(came.missing), came.missing % 1
    found = [0.0] * (min(missed, came.copied) + 1)
    for missing, share in ((few, 1 - more), (few + 1, more)):
        missing = max(missing, came.copied, missed)
        ways = math.comb(missing, came.copied)
        for used in range(len(found)):
            found[used] += share * math.comb(missed, used) * math.comb(missing - missed, came.copied - used) / ways
    return [*enumerate(found)]


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
