"""A timeline of what each stage did and waited for, and its form as a Chrome trace, which opens in Perfetto (ui.perfetto.dev).

Executed and simulated timelines are the same: spans on tracks, in seconds of one clock. The format is "Trace Event Format" of
the Chromium project: complete events (``ph: X``) in microseconds, one process a rank, one thread a track.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PASS, COMPUTE, CPU, H2D, SSD = "pass", "compute", "cpu", "h2d", "ssd"
KV, EXPERTS, D2H, SSD_WRITE = "h2d.kv", "h2d.experts", "d2h", "ssd_write"
HOP, LAUNCH = "hop", "launch"
TITLES = {
    PASS: "passes", COMPUTE: "compute", CPU: "CPU beside the card", H2D: "H2D copies", KV: "H2D copies of KV",
    EXPERTS: "H2D copies of experts", D2H: "D2H copies of KV", SSD_WRITE: "SSD writes of KV", SSD: "SSD reads, whole",
    HOP: "hops to the next rank", LAUNCH: "launching",
}  # fmt: skip
"""Tracks in the order in which they are shown. A track ``ssd.3`` is the third reader's own."""

CLOCK_S = 5e-6
"""Two spans of one queue that overlap by less do not: events of a card are dated to about a microsecond."""


class Span(NamedTuple):
    """``track`` worked on ``name`` or, with ``waits_for``, waited until that stage had brought it. Seconds of one clock."""

    track: str
    name: str
    start: float
    end: float
    nbytes: int = 0
    waits_for: str = ""
    part_of: int = 0
    """Blocks of one read carry the same number, from 1 on."""


class Sample(NamedTuple):
    """A figure at a moment, such as the card's clock."""

    name: str
    at: float
    value: float


@dataclass(frozen=True)
class Timeline:
    """What there is to show. ``facts`` say where it comes from; values are JSON's."""

    spans: Sequence[Span]
    samples: Sequence[Sample] = ()
    title: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    others: Sequence[Sequence[Span]] = ()
    """Spans of the ranks behind the first one, on the same clock."""

    @property
    def each(self) -> Sequence[Sequence[Span]]:
        """Spans of every rank."""
        return (self.spans, *self.others)

    @property
    def origin(self) -> float:
        """When the first span begins."""
        return min((s.start for spans in self.each for s in spans), default=0.0)


def whole_reads(spans: Iterable[Span]) -> list[Span]:
    """One span on the track ``ssd`` for all blocks of a read, from the first one's begin to the last one's end."""
    reads: dict[int, Span] = {}
    for s in spans:
        if s.part_of:
            have = reads.get(s.part_of)
            reads[s.part_of] = Span(
                SSD,
                s.name,
                min(s.start, have.start) if have else s.start,
                max(s.end, have.end) if have else s.end,
                s.nbytes + (have.nbytes if have else 0),
            )
    return sorted(reads.values(), key=lambda s: s.start)


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """``spans`` of one track dealt out so that none overlaps another of its lane; as few lanes as that takes."""
    dealt: list[list[Span]] = []
    for s in sorted(spans, key=lambda s: (s.start, s.end)):
        lane = next((lane for lane in dealt if lane[-1].end <= s.start + CLOCK_S), None)
        if lane is None:
            dealt.append([s])
        else:
            lane.append(s._replace(start=max(s.start, lane[-1].end), end=max(s.end, lane[-1].end)))
    return dealt


def busy_s(spans: Iterable[Span], start: float, end: float) -> float:
    """Length of the union of ``spans`` within ``start`` to ``end``."""
    total, until = 0.0, start
    for s in sorted(spans, key=lambda s: s.start):
        total += max(0.0, min(s.end, end) - max(s.start, until))
        until = max(until, min(s.end, end))
    return total


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a JSON document, a process for each rank. Costs about 1 kB of memory a span. All spans are gone through a few times,
    whatever their number."""
    origin, events = timeline.origin, list[dict[str, Any]]()
    for rank, spans in enumerate(timeline.each):
        whose = f"rank {rank}: {timeline.title}" if timeline.others else timeline.title
        events += [_named("process_name", rank + 1, 0, whose), *_of_rank(rank + 1, spans, origin)]
    events += [{"ph": "C", "pid": 1, "name": s.name, "ts": _us(s.at - origin), "args": {"value": s.value}} for s in timeline.samples]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(timeline.facts)}


def _of_rank(pid: int, spans: Sequence[Span], origin: float) -> Iterator[dict[str, Any]]:
    tracks: dict[str, list[Span]] = defaultdict(list)
    for s in [*spans, *whole_reads(spans)]:
        tracks[s.track].append(s)
    tid = 0
    for track in sorted(tracks, key=_order):
        for k, lane in enumerate(lanes(tracks[track])):
            tid += 1
            more = f" ({k + 1})" if k else ""
            yield from (_named("thread_name", pid, tid, _title(track) + more), _named("thread_sort_index", pid, tid, tid))
            yield from (_complete(s, pid, tid, origin) for s in lane)


def _complete(span: Span, pid: int, tid: int, origin: float) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if span.waits_for:
        args = {"for": span.name}
    elif span.nbytes:
        args = {"bytes": span.nbytes}
        if span.end > span.start:
            args["GB/s"] = round(span.nbytes / (span.end - span.start) / 1e9, 3)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": f"wait: {span.waits_for}" if span.waits_for else span.name,
        "cat": "wait" if span.waits_for else span.track.partition(".")[0],
        "ts": _us(span.start - origin),
        "dur": _us(span.end - span.start),
        "args": args,
    }


def _named(kind: str, pid: int, tid: int, value: Any) -> dict[str, Any]:
    key = "sort_index" if kind == "thread_sort_index" else "name"
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {key: value}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _title(track: str) -> str:
    stage, _, number = track.partition(".")
    return f"SSD reader {number}" if number.isdigit() else TITLES.get(track, track)


def _order(track: str) -> tuple[int, int, str]:
    stage, _, number = track.partition(".")
    names = list(TITLES)
    place = next((names.index(name) for name in (track, stage) if name in names), len(names))
    return (place, int(number) + 1 if number.isdigit() else 0, track)
