"""What is printed of a sweep: a line for each point as it ends, and a table of all."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from penstock.planner.common.command.overrides import key_of
from penstock.planner.common.command.sweep_folders import Point
from penstock.planner.common.console import Screen
from penstock.planner.common.measures import show_rate

WIDEST = 400
"""Columns of the table where no terminal bounds it."""


def swept_keys(typed: Sequence[str]) -> frozenset[str]:
    """Keys that are given several values on the command line ``typed``."""
    return frozenset(key_of(override) for override in typed if any(sign in override.partition("=")[2] for sign in ",("))


def point_line(point: Point, swept: frozenset[str]) -> str:
    """The point's overrides, those of ``swept`` alone where there are any, and its figures or its error, and its files."""
    asked = [o for o in point.overrides if not swept or key_of(o) in swept]
    known = [(name, value) for name, value in point.figures.items() if value is not None]
    figures = [f"{name} {value}" if isinstance(value, str) else f"{_shown(value)} {name}" for name, value in known]
    became = point.error if point.error is not None else ", ".join(figures) or f"status {point.status}"
    return "  ".join(part for part in (f"[{point.number}]", *asked, became, *point.files) if part)


def print_points(points: Sequence[Point]) -> None:
    """A row a point: what differs in what was asked, figures or the error's beginning, the first file."""
    console = Screen(highlight=False, emoji=False, markup=False)
    console.width = console.width if console.is_terminal else WIDEST
    asked = [{key_of(o): o.partition("=")[2] for o in point.overrides} for point in points]
    keys = [k for k in dict.fromkeys(k for one in asked for k in one) if len({one.get(k) for one in asked}) > 1]
    figures = list(dict.fromkeys(name for point in points for name in point.figures))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", justify="right")
    for name in (*keys, *figures, ""):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for point, own in zip(points, asked, strict=True):
        last = (point.files or ("",))[0] if point.error is None else point.error.partition(":")[0]
        table.add_row(str(point.number), *(own.get(k, "") for k in keys), *(_shown(point.figures.get(f)) for f in figures), last)
    console.print(table)


def _shown(value: str | float | None) -> str:
    return "-" if value is None else value if isinstance(value, str) else show_rate(value)
