"""A timeline as a picture. Matplotlib is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.planner.common.timeline.spans import (
    COMPUTE,
    CPU,
    EXPERTS,
    H2D,
    HOP,
    KV,
    PASS,
    SSD,
    Span,
    Timeline,
    busy_s,
    lanes,
    whole_reads,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROWS = {PASS: "pass", COMPUTE: "compute", CPU: "CPU", H2D: "H2D copy", EXPERTS: "expert copy", SSD: "SSD read"}
"""Tracks that are drawn, from the top; the others are in a trace of JSON alone."""
COLOURS = {
    "attention": "#4C78A8",
    "FFN": "#72B7B2",
    "LM head": "#B279A2",
    "expert": "#54A24B",
    "layer": "#8CA252",
    "pass": "#D9D9D9",
    "pass, every other": "#BFBFBF",
}
WAITS = {SSD: "#E45756", H2D: "#F58518", EXPERTS: "#FF9DA6", KV: "#D67195", COMPUTE: "#EECA3B", CPU: "#9D755D", HOP: "#79706E"}
"""By what is waited for."""
NAMES = ROWS | {KV: "KV copy", HOP: "hop"}
PASSES = 4
"""Passes of the upper panel: the prefill and the first decode steps; of more, units would be thinner than a line."""
HEIGHT = 0.8
"""Of a row's spans, whose lanes share it."""
THIN = 0.3
"""Height of a wait."""
LETTER = 0.0045
"""Width of a small letter, as a share of a panel's."""


class _Window(NamedTuple):
    """What one panel shows."""

    title: str
    start: float
    end: float


class _Row(NamedTuple):
    """One track of one rank, and all spans of that."""

    rank: int
    track: str
    spans: Sequence[Span]


def draw(timeline: Timeline, path: Path) -> None:
    """Draw ``timeline`` to ``path``: the first passes in one panel, the last one of those, enlarged, in another. Ranks are drawn below each
    other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    windows = list(_windows(timeline))
    each = [[s for s in spans if not s.part_of] + whole_reads(spans) for spans in timeline.each]
    rows = [_Row(rank, track, spans) for rank, spans in enumerate(each) for track in ROWS if any(s.track == track for s in spans)]
    figure = Figure(figsize=(15, 1.3 + len(windows) * (0.62 * len(rows) + 0.75)), dpi=130, layout="constrained")
    panels = figure.subplots(len(windows), 1, squeeze=False)[:, 0]
    for axes, window in zip(panels, windows, strict=True):
        _panel(axes, window, rows, timeline.origin, len(each) > 1)
    panels[-1].set_xlabel("seconds")
    _legend(figure, [s for spans in each for s in spans])
    figure.suptitle(timeline.title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path)


def _windows(timeline: Timeline) -> Iterator[_Window]:
    passes = sorted((s for s in timeline.spans if s.track == PASS), key=lambda s: s.start)
    if not passes:
        yield _Window("everything", timeline.origin, max((s.end for spans in timeline.each for s in spans), default=1.0))
        return
    first = passes[:PASSES]
    shown = first[0].name if len(first) == 1 else f"{first[0].name} to {first[-1].name}"
    yield _Window(f"{shown}, of {len(passes)} passes", first[0].start, first[-1].end)
    if len(first) > 1:
        yield _Window(f"{first[-1].name}, enlarged", first[-1].start, first[-1].end)


def _panel(axes: Axes, window: _Window, rows: Sequence[_Row], origin: float, ranks: bool) -> None:
    length = window.end - window.start
    labels = []
    for k, (rank, row, spans) in enumerate(rows):
        mine = [s for s in spans if s.track == row and s.end > window.start and s.start < window.end]
        bottom = len(rows) - 1 - k - HEIGHT / 2
        work, waits = [s for s in mine if not s.waits_for], [s for s in mine if s.waits_for]
        dealt = lanes(_whole_copies(work) if row in (H2D, EXPERTS) else work)
        for lane, members in enumerate(dealt):
            height = HEIGHT / len(dealt)
            low = bottom + HEIGHT - (lane + 1) * height
            for index, span in enumerate(members):
                _box(axes, span, index, window, origin, low, height)
        for span in waits:
            start, end = max(span.start, window.start), min(span.end, window.end)
            axes.broken_barh(
                [(start - origin, end - start)], (bottom + (HEIGHT - THIN) / 2, THIN), facecolors=WAITS[span.waits_for], linewidth=0
            )
        share = busy_s(work, window.start, window.end) / length
        whose = f"rank {rank}: " if ranks and row != PASS else ""
        labels.append(ROWS[row] if row == PASS else f"{whose}{ROWS[row]}\nbusy {share:.0%}")
    axes.set_yticks([len(rows) - 1 - k for k in range(len(rows))], labels)
    axes.set_ylim(-0.55, len(rows) - 0.45)
    axes.set_xlim(window.start - origin, window.end - origin)
    axes.set_title(window.title, loc="left", fontsize=10)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _box(axes: Axes, span: Span, index: int, window: _Window, origin: float, low: float, height: float) -> None:
    start, end = max(span.start, window.start), min(span.end, window.end)
    wide = (end - start) / (window.end - window.start)
    axes.broken_barh(
        [(start - origin, end - start)],
        (low, height),
        facecolors=COLOURS[_look(span, index)],
        edgecolors="white",
        linewidth=0.5 if wide > 0.004 else 0,
    )
    text = next((text for text in _labels(span) if (len(text) + 1) * LETTER <= wide), None)
    if text and height > HEIGHT / 4:
        size = 8 if (len(text) + 1) * 1.4 * LETTER <= wide and height > HEIGHT / 3 else 6
        axes.text((start + end) / 2 - origin, low + height / 2, text, ha="center", va="center", fontsize=size, clip_on=True)


def _labels(span: Span) -> Iterator[str]:
    """What a box may say, the longest first: a unit's kind shows in its colour, so its number is enough."""
    yield span.name
    if span.track != PASS:
        yield span.name.rpartition(" " if span.track == SSD else ".")[2]


def _whole_copies(spans: Sequence[Span]) -> list[Span]:
    """Neighbouring spans of the same name as one: a unit is copied in chunks."""
    joined: list[Span] = []
    for s in sorted(spans, key=lambda s: s.start):
        if joined and joined[-1].name == s.name and s.start <= joined[-1].end + (s.end - s.start):
            joined[-1] = joined[-1]._replace(end=max(s.end, joined[-1].end))
        else:
            joined.append(s)
    return joined


def _look(span: Span, index: int) -> str:
    if span.track == PASS:
        return "pass, every other" if index % 2 else "pass"
    if span.track == SSD:
        return "layer"
    return {"attn": "attention", "ffn": "FFN", "head": "LM head", "expert": "expert"}.get(span.name.partition(".")[0], "layer")


def _legend(figure: Figure, spans: Sequence[Span]) -> None:
    from matplotlib.patches import Patch

    looks = dict.fromkeys(_look(s, 0) for s in spans if not s.waits_for and s.track in ROWS and s.track != PASS)
    waits = {(s.track, s.waits_for) for s in spans if s.waits_for and s.track in ROWS}
    handles = [Patch(color=COLOURS[look], label=look) for look in COLOURS if look in looks]
    for stage, colour in WAITS.items():
        who = [ROWS[track] for track, waited in sorted(waits) if waited == stage]
        if who:
            handles.append(Patch(color=colour, label=f"{' and '.join(who)} waits for {NAMES[stage]}"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9, frameon=False)
