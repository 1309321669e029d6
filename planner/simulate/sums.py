"""What adds up over passes, so that periods that repeat can be added instead of acted out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.planner.contract.policy.layer_slots import CacheStats
from penstock.planner.simulate.events import Record

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


def _lists(record: Record, stats: CacheStats) -> Sequence[list[Any]]:
    return record.prefill_ns, record.step_ns, stats.log
