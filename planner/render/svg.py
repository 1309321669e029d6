"""Pictures as SVG text for a page: colours are the page's, by class, so that they follow its light or dark background."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.contract.plan.tier_fill import Fill
from penstock.planner.contract.prices.memory_law import LEFT_ALONE
from penstock.planner.render.step_lanes import Lane

WIDTH = 720
"""Units across a picture; the page scales it to its own width."""
LEFT = 90
"""Of which for names."""
LEFT_OF_STEP = 160
"""The same where figures stand beside them."""
SEAM = 3
"""Pieces of work narrower than this have no seam."""
COLOURS = 8
"""Classes ``c0`` to ``c7`` that a page gives a colour each."""
ROW, BAR = 34, 22
LETTER = 6.2
"""Width of a letter of the pictures' text."""


def look_of(kind: str) -> str:
    """The class of a piece of a step's work."""
    return {"attn": "c0", "ffn": "c2", "head": "c4", "layer": "c1", "rest": "c3", "wait": "left", "pass": "c5"}[kind]


def look_of_item(item: str, at: int) -> str:
    """The class of a tier's item, the ``at``-th."""
    return "left" if item in LEFT_ALONE else f"c{at % COLOURS}"


def tiers_picture(fills: Sequence[Fill]) -> str:
    """A bar for each tier, filled to its own scale."""
    span, parts = WIDTH - LEFT - 4, []
    for row, fill in enumerate(fills):
        y, x = row * ROW + 4, float(LEFT)
        parts += [_text(0, y + 15, fill.tier.upper(), "name"), _box(LEFT, y, span, BAR, "free", "")]
        for at, (item, nbytes) in enumerate(fill.items.items()):
            width = span * nbytes / max(fill.capacity_bytes, fill.taken_bytes)
            look = look_of_item(item, at)
            said = item.replace("_", " ")
            parts.append(_box(x, y, width, BAR, look, f"{said} {show_bytes(nbytes)}"))
            if len(said) * LETTER + 6 < width:
                parts.append(_text(x + 4, y + 15, said, "in"))
            x += width
    return _svg(len(fills) * ROW + 4, parts, "Each tier, filled to scale")


def step_picture(lanes: Sequence[Lane], seconds: float, names: dict[str, str]) -> str:
    """A lane for each stage of one step that lasts ``seconds``; ``names`` are the stages'."""
    span, parts = WIDTH - LEFT_OF_STEP - 4, []
    for row, lane in enumerate(lanes):
        y = row * ROW + 4
        name = names.get(lane.stage, lane.stage)
        parts.append(_text(0, y + 15, f"{name} {show_seconds(lane.busy_s)}, {lane.busy_s / seconds:.0%}", "name"))
        parts.append(_box(LEFT_OF_STEP, y, span, BAR, "free", ""))
        for part in lane.parts:
            x, width = LEFT_OF_STEP + span * part.start_s / seconds, span * (part.end_s - part.start_s) / seconds
            look = f"{look_of(part.kind)}{' seam' if width > SEAM else ''}"
            parts.append(_box(x, y, width, BAR, look, f"{name}: {part.name}, {show_seconds(part.end_s - part.start_s)}"))
    y = len(lanes) * ROW + 4
    parts.append(f'<line x1="{LEFT_OF_STEP}" y1="{y}" x2="{WIDTH - 4}" y2="{y}" class="axis"/>')
    for quarter in range(5):
        x = LEFT_OF_STEP + span * quarter / 4
        parts.append(_text(x, y + 15, show_seconds(seconds * quarter / 4), "last" if quarter == 4 else "mid" if quarter else ""))
    return _svg(y + 20, parts, "A decode step, stage by stage")


def change_picture(rows: Sequence[tuple[str, float, float | None]]) -> str:
    """Bars to both sides of nothing: (name, share that a step more takes, share that a step less takes, None for no plan at all). Less time
    to the left."""
    middle, reach, parts = LEFT + (WIDTH - LEFT) / 2, (WIDTH - LEFT) / 2 - 70, []
    largest = max([abs(share) for _, more, less in rows for share in (more, less) if share is not None] + [1e-6])
    for row, (name, more, less) in enumerate(rows):
        y = row * ROW + 4
        parts.append(_text(0, y + 15, name, "name"))
        if less is None:
            parts.append(_text(middle + 6, y + 15, "a step less: no plan fits", "bad"))
        shares = [(more, "good", "a step more")] + ([] if less is None else [(less, "bad", "a step less")])
        same_side = less is not None and more * less > 1e-12
        height = BAR / len(shares) if same_side else BAR
        for at, (share, look, what) in enumerate(shares):
            width, top = reach * abs(share) / largest, y + at * height * same_side
            x = middle - width if share < 0 else middle
            parts.append(_box(x, top, width, height, look, f"{what}: {share:+.2%}"))
            if width >= 1:
                at_end = (x - 4, "last") if share < 0 else (x + width + 4, "")
                parts.append(_text(at_end[0], top + height / 2 + 4, f"{share:+.1%}", at_end[1]))
    parts.append(f'<line x1="{middle}" y1="0" x2="{middle}" y2="{len(rows) * ROW}" class="axis"/>')
    y = len(rows) * ROW + 14
    parts += [_text(middle - 6, y, "faster", "last"), _text(middle + 6, y, "slower")]
    return _svg(y + 6, parts, "What a step more and less of each resource changes")


def lack_picture(rows: Sequence[tuple[str, int, int]]) -> str:
    """(name, bytes there, bytes that lack) as bars, each to its own scale."""
    span, parts = WIDTH - LEFT - 4, []
    for row, (name, there, lacks) in enumerate(rows):
        y, width = row * ROW + 4, span * there / max(1, there + lacks)
        parts += [
            _text(0, y + 15, name, "name"),
            _box(LEFT, y, width, BAR, "c0", f"{show_bytes(there)} there"),
            _box(LEFT + width, y, span - width, BAR, "bad", f"{show_bytes(lacks)} short"),
        ]
        if lacks and len(text := f"{show_bytes(lacks)} short") * LETTER + 6 < span - width:
            parts.append(_text(LEFT + width + 4, y + 15, text, "in"))
    return _svg(len(rows) * ROW + 4, parts, "What each capacity has and lacks")


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    body = "\n".join(part for part in parts if part)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">\n{body}\n</svg>'


def _box(x: float, y: float, width: float, height: float, look: str, said: str) -> str:
    if width <= 0:
        return ""
    title = f"<title>{escape(said)}</title>" if said else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" class="{look}">{title}</rect>'


def _text(x: float, y: float, text: str, look: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}"{f" class={chr(34)}{look}{chr(34)}" if look else ""}>{escape(text)}</text>'
