"""What adds up over passes, so that periods that repeat can be added instead of acted out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.planner.contract.policy.layer_slots import CacheStats
from penstock.planner.simulate.lanes.events import Record

ADDED = ("hits", "misses", "loads", "evictions_out_of_window", "evictions_in_window", "shrinks", "waits", "accesses")
"""Of ``CacheStats``, what adds up."""


@dataclass(frozen=True)
class Sums:
    """Everything that adds up, at one moment: totals and the lengths of lists."""

    counts: Counter[str]
    stats: dict[str, int]
    lengths: tuple[int, ...]
    offset_ns: int

    @classmethod
    def of(cls, record: Record, stats: CacheStats) -> Sums:
        lengths = tuple(map(len, _lists(record, stats)))
        return cls(Counter(record.counts), {name: getattr(stats, name) for name in ADDED}, lengths, record.offset_ns)

    def repeat(self, times: int, record: Record, stats: CacheStats) -> None:
        """Let what came since this moment come ``times`` times more."""
        now = Sums.of(record, stats)
        for key, count in now.counts.items():
            record.counts[key] += times * (count - self.counts[key])
        for name in ADDED:
            setattr(stats, name, now.stats[name] + times * (now.stats[name] - self.stats[name]))
        for items, since in zip(_lists(record, stats), self.lengths, strict=True):
            items += items[since:] * times
        record.offset_ns += times * (now.offset_ns - self.offset_ns)


@dataclass(frozen=True)
class Stand:
    """Where something stands between two passes: ``state`` is all that what comes depends on."""

    state: object
    passes: int
    """That are over."""
    sums: Sums
    skip: Callable[[Sums, int, int], None]
    """Called with the sums of an earlier moment, the passes since then, and how often they come again."""


def acted_out(count: int, ahead: int, act: Callable[[], None], stand: Callable[[], Stand | Sequence[Stand] | None]) -> None:
    """``act`` so many times. Once a state comes again, whole periods are added up, but for the last ``ahead`` times. ``stand`` is asked
    before each; of several that go on together it says all."""
    seen: dict[object, tuple[int, Sequence[Stand]]] | None = {}
    done = 0
    while done < count:
        now = stand() if seen is not None else None
        if seen is not None and now is not None:
            stands = [now] if isinstance(now, Stand) else now
            state = tuple(each.state for each in stands)
            if state in seen:
                before, then = seen[state]
                times = max(0, count - done - ahead) // (done - before)
                for each, was in zip(stands, then, strict=True):
                    each.skip(was.sums, each.passes - was.passes, times)
                done, seen = done + times * (done - before), None
                continue
            seen[state] = done, stands
        act()
        done += 1


def _lists(record: Record, stats: CacheStats) -> Sequence[list[Any]]:
    return record.prefill_ns, record.step_ns, stats.log
