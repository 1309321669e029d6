"""What a simulation leaves behind: totals, waits, the length of each pass, and spans as a real run's ledger keeps them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.planner.common.timeline.spans import PASS, Span
from penstock.planner.simulate.lanes.lanes import NS

SPANS_KEPT = 200_000
"""Spans of a simulation's timeline, at most: as many as of a run's."""


@dataclass
class Record:
    """``offset_ns`` is the time at which the clock was set to 0 last. While ``keep_spans`` holds there is room for more."""

    keep_spans: bool = False
    offset_ns: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Integers that only grow."""
    prefill_ns: list[int] = field(default_factory=list)
    """Of each batch."""
    step_ns: list[int] = field(default_factory=list)
    """Of each decode step, those of all batches one after the other."""
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    held: list[int] = field(default_factory=list)
    """The fewest and the most layers that the DRAM cache's policy held after an access."""

    def begin(self) -> None:
        """What came before does not count."""
        self.offset_ns = 0
        self.counts.clear()
        self.spans.clear()

    def booked(self, track: str, name: str, begin: int, end: int, nbytes: int) -> None:
        """Work is over."""
        self.keep(Span(track, name, self._s(begin), self._s(end), nbytes))

    def waited(self, track: str, waits_for: str, name: str, begin: int, end: int) -> None:
        """``track`` waited until ``waits_for`` had brought ``name``. Nothing when ``end`` is not after ``begin``."""
        if end <= begin:
            return
        self.counts[f"{track} waits for {waits_for}"] += 1
        self.counts[f"{track} waits for {waits_for}, ns"] += end - begin
        self.keep(Span(track, name, self._s(begin), self._s(end), 0, waits_for))

    def passed(self, name: str, since_ns: int) -> None:
        """A pass is over, or several. ``since_ns``: the offset at which they began."""
        self.keep(Span(PASS, name, since_ns / NS, self.offset_ns / NS))

    def keep(self, span: Span) -> None:
        if not self.keep_spans:
            return
        if len(self.spans) < SPANS_KEPT:
            self.spans.append(span)
        else:
            self.dropped += 1

    @property
    def full(self) -> bool:
        """Nothing more will be kept."""
        return not self.keep_spans or len(self.spans) >= SPANS_KEPT

    def saw_held(self, layers: int) -> None:
        self.held = [min(self.held[0], layers), max(self.held[1], layers)] if self.held else [layers, layers]

    def _s(self, at: int) -> float:
        return (self.offset_ns + at) / NS
