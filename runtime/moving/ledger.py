"""What each stage did: bytes, busy seconds, waits, and, when asked for, a span per piece of work."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, replace

from penstock.planner.common.timeline.spans import Span

SPANS_KEPT = 200_000
"""Spans of a run's timeline, at most: about 50 MB. What comes later is counted, not kept."""


@dataclass
class StageTotals:
    """Of a stage or a track; ``busy_s`` is the length of the union of its spans."""

    bytes: int = 0
    busy_s: float = 0.0
    count: int = 0
    until_s: float = 0.0
    """End of the last span."""

    @property
    def mbps(self) -> float | None:
        """MB/s while busy; None before anything was done."""
        return self.bytes / self.busy_s / 1e6 if self.busy_s else None

    def add(self, start: float, end: float, nbytes: int) -> None:
        self.bytes += nbytes
        self.count += 1
        begin = self.until_s if self.until_s > start else start
        if end > begin:
            self.busy_s += end - begin
        if end > self.until_s:
            self.until_s = end


class Ledger:
    """Totals per stage and per track, safe to write from any thread. Spans of one stage must be added in order of their end."""

    def __init__(self, keep_spans: bool = False):
        self._keep = keep_spans
        self._lock = threading.Lock()
        self._totals: defaultdict[str, StageTotals] = defaultdict(StageTotals)
        self._tracks: defaultdict[str, StageTotals] = defaultdict(StageTotals)
        self._waits: dict[str, float] = {}
        self.spans: list[Span] = []
        """In the order of their end within each track."""
        self.dropped = 0
        """Spans that were not kept, because there were too many."""

    @property
    def keeps_spans(self) -> bool:
        """Whether a timeline is asked for."""
        return self._keep

    def add(self, stage: str, name: object, start: float, end: float, nbytes: int = 0, track: str | None = None) -> None:
        """Record work of ``stage`` between two host times, on a ``track`` of its own where several do it at once. ``name`` is asked for its
        ``str`` where spans are kept."""
        with self._lock:
            self._totals[stage].add(start, end, nbytes)
            self._tracks[track or stage].add(start, end, nbytes)
        if self._keep:
            self.keep(Span(track or stage, str(name), start, end, nbytes))

    def waited(self, track: str, waits_for: str, name: str, start: float, end: float) -> None:
        """``track`` waited until the stage ``waits_for`` had brought ``name``. Nothing when ``end`` is not after ``start``."""
        if end <= start:
            return
        with self._lock:
            self._waits[waits_for] = self._waits.get(waits_for, 0.0) + end - start
        if self._keep:
            self.keep(Span(track, name, start, end, 0, waits_for))

    def keep(self, span: Span) -> None:
        """Keep a span that no total counts, if spans are kept."""
        with self._lock:
            if not self._keep:
                return
            if len(self.spans) < SPANS_KEPT:
                self.spans.append(span)
            else:
                self.dropped += 1

    def keep_block(self, reader: str, name: str, number: int, start: float, end: float, nbytes: int) -> None:
        """Keep one block's read, a part of read ``number``, on the track of the thread that read it."""
        self.keep(Span(reader.replace("-", "."), name, start, end, nbytes, part_of=number))

    def totals(self) -> dict[str, StageTotals]:
        """A snapshot per stage."""
        with self._lock:
            return {stage: replace(t) for stage, t in self._totals.items()}

    def tracks(self) -> dict[str, StageTotals]:
        """A snapshot per track: of a stage that several do at once the part of each."""
        with self._lock:
            return {track: replace(t) for track, t in self._tracks.items()}

    def waits(self) -> dict[str, float]:
        """Stage -> seconds in which the next stage waited for it."""
        with self._lock:
            return dict(self._waits)

    def now(self) -> float:
        """The ledger's clock."""
        return time.perf_counter()
