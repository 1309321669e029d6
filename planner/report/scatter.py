"""A scatter plot as SVG: for a page that opens without a network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 46
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
SHAPES = ("circle", "square", "triangle", "diamond", "cross")
"""With as many groups as colours the next shape begins, so that no two of 40 look alike."""
LOG_FROM = 30.0
"""Largest over smallest value from which an axis is logarithmic."""


@dataclass(frozen=True)
class Mark:
    """One point of a plot; ``label`` shows when it is pointed at."""

    x: float
    y: float
    label: str
    group: str


@dataclass(frozen=True)
class Axis:
    """Values to pixels, from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """An axis with room for ``values``, which are positive."""
        low, high = min(values), max(values)
        if high / low >= LOG_FROM:
            return cls(low / 1.3, high * 1.3, start, end, True)
        return cls(0.0, high * 1.08, start, end, False)

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return round(self.start + (at - low) / (high - low) * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        """Round values: 1, 2 and 5 times powers of ten."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            marks = [m * 10.0**p for p in powers for m in (1, 2, 5)]
            inside = [value for value in marks if self.low <= value <= self.high]
            return inside if len(inside) <= 8 else [v for v in inside if f"{v:e}"[0] == "1"]
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        return [step * i for i in range(math.ceil(self.low / step), int(self.high / step) + 1)]


def pareto(marks: Sequence[Mark]) -> list[Mark]:
    """Those that no other beats: nothing with as little ``x`` has more ``y``. In order of ``x``."""
    front: list[Mark] = []
    for mark in sorted(marks, key=lambda m: (m.x, -m.y)):
        if not front or mark.y > front[-1].y:
            front.append(mark)
    return front


def colour(group: str, groups: Sequence[str]) -> str:
    """Of one of ``groups``, the same in every plot."""
    return COLOURS[groups.index(group) % len(COLOURS)]


def mark_at(x: float, y: float, group: str, groups: Sequence[str], title: str = "") -> str:
    """An SVG element: the mark of one of ``groups``, the same in every plot."""
    shape, look = SHAPES[groups.index(group) // len(COLOURS) % len(SHAPES)], f'fill="{colour(group, groups)}"'
    said = f"<title>{escape(title)}</title>" if title else ""
    if shape == "circle":
        return f'<circle cx="{x}" cy="{y}" r="4.5" {look}>{said}</circle>'
    outlines = {
        "square": ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        "triangle": ((0, -5), (5, 4), (-5, 4)),
        "diamond": ((0, -6), (6, 0), (0, 6), (-6, 0)),
        "cross": ((-2, -5), (2, -5), (2, -2), (5, -2), (5, 2), (2, 2), (2, 5), (-2, 5), (-2, 2), (-5, 2), (-5, -2), (-2, -2)),
    }
    points = " ".join(f"{x + right:g},{y + down:g}" for right, down in outlines[shape])
    return f'<polygon points="{points}" {look}>{said}</polygon>'


def scatter(title: str, x_label: str, y_label: str, marks: Sequence[Mark], groups: Sequence[str], diagonal: bool = False) -> str:
    """An SVG element: ``marks`` with the Pareto front of each group, or with the diagonal on which both values are the same. Without marks
    nothing at all."""
    if not marks:
        return ""
    head = f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
    name = f'<text class="name" x="{LEFT}" y="18">{escape(title)}</text>'
    both = [m.x for m in marks] + [m.y for m in marks]
    x = Axis.over(both if diagonal else [m.x for m in marks], LEFT, WIDTH - RIGHT)
    y = Axis.over(both if diagonal else [m.y for m in marks], HEIGHT - BOTTOM, TOP)
    body = [head, name, *_grid(x, y, x_label, y_label)]
    if diagonal:
        body.append(f'<line class="front" x1="{x(x.low)}" y1="{y(y.low)}" x2="{x(x.high)}" y2="{y(y.high)}"/>')
    for group in () if diagonal else groups:
        front = pareto([m for m in marks if m.group == group])
        if len(front) > 1:
            path = f"M{x(front[0].x)} {y(front[0].y)}" + "".join(f"H{x(m.x)}V{y(m.y)}" for m in front[1:])
            body.append(f'<path class="front" style="stroke:{colour(group, groups)}" d="{path}"/>')
    body += [mark_at(x(mark.x), y(mark.y), mark.group, groups, mark.label) for mark in marks]
    return "".join([*body, "</svg>"])


def _grid(x: Axis, y: Axis, x_label: str, y_label: str) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in x.ticks:
        yield f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text x="{x(tick)}" y="{bottom + 15}" text-anchor="middle">{tick:.4g}</text>'
    for tick in y.ticks:
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(tick)}" y2="{y(tick)}"/>'
        yield f'<text x="{LEFT - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:.4g}</text>'
    yield f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    yield f'<text transform="translate(14 {(TOP + bottom) / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'


def legend(groups: Sequence[str]) -> str:
    """Which colour is which group, as HTML."""
    items = (f'<span><svg viewBox="0 0 14 14">{mark_at(7, 7, group, groups)}</svg>{escape(group)}</span>' for group in groups)
    return f'<p class="legend">{"".join(items)}</p>'
