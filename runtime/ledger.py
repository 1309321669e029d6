"""What each stage did: bytes, busy seconds, waits, and, when asked for, a span per piece of work."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One piece of work of ``stage`` on host time (seconds of ``time.perf_counter``)."""

    stage: str
    name: str
    start: float
    end: float


@dataclass
class StageTotals:
    """``busy_s`` is the length of the union of the stage's spans."""

    bytes: int = 0
    busy_s: float = 0.0
    count: int = 0

    @property
    def mbps(self) -> float | None:
        """MB/s while busy; None before anything was done."""
        return self.bytes / self.busy_s / 1e6 if self.busy_s else None


class Ledger:
    """Totals per stage, safe to write from any thread. Spans of one stage must be added in order of their end."""

    def __init__(self, keep_spans: bool = False):
        self._keep = keep_spans
        self._lock = threading.Lock()
        self._totals: dict[str, StageTotals] = {}
        self._ends: dict[str, float] = {}
        self.spans: list[Span] = []

    def add(self, stage: str, name: str, start: float, end: float, nbytes: int = 0) -> None:
        """Record work of ``stage`` between two host times."""
        with self._lock:
            totals = self._totals.setdefault(stage, StageTotals())
            totals.bytes += nbytes
            totals.count += 1
            totals.busy_s += max(0.0, end - max(start, self._ends.get(stage, 0.0)))
            self._ends[stage] = max(end, self._ends.get(stage, 0.0))
            if self._keep:
                self.spans.append(Span(stage, name, start, end))

    def totals(self) -> dict[str, StageTotals]:
        """A snapshot per stage."""
        with self._lock:
            return {stage: StageTotals(t.bytes, t.busy_s, t.count) for stage, t in self._totals.items()}

    def now(self) -> float:
        """The ledger's clock."""
        return time.perf_counter()
