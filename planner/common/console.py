"""The terminal that verbs print to: its width, and the lines that all of them are made of."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from penstock.planner.common.interrupt import LEFT_BY_READER

WIDTH = 80
"""Columns that the output needs at most; a wider terminal is not filled."""


class Screen(Console):
    """A console on stdout whose reader may leave. The program then ends as with `print`, where rich's own would call it a failure."""

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(LEFT_BY_READER) from None


_LABEL, _VALUE = 14, 22
"""Columns of a table's labels, and of its values."""


def make_console() -> Screen:
    """A console on stdout, at most ``WIDTH`` columns, with colours only on a terminal."""
    console = Screen(highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


@contextmanager
def uncut(console: Console) -> Iterator[None]:
    """``console`` with ``WIDTH`` columns at least. A narrower terminal goes on in its next row, and no figure is cut off."""
    usual = console.width
    console.width = max(usual, WIDTH)
    try:
        yield
    finally:
        console.width = usual


def print_head(console: Console, name: str, rest: str = "") -> None:
    console.print()
    print_line(console, Text(name, style="bold").append(rest, style="not bold dim"))


def print_line(console: Console, text: Text) -> None:
    text.rstrip()
    with uncut(console):
        console.print(text, overflow="ellipsis", no_wrap=True, crop=True)


def print_rows(console: Console, name: str, rows: Iterator[tuple[str, str, str]]) -> None:
    """As ``print_table``, with nothing cut: a remark that has no room beside its value goes on below."""
    print_head(console, name)
    indent = " " * (_LABEL + _VALUE + 1)
    for label, value, remark in rows:
        beside, below = remark, list[str]()
        if len(remark) > console.width - max(len(indent), _LABEL + len(value) + 2):
            lines = textwrap.wrap(remark, max(20, console.width - len(indent)), break_on_hyphens=False)
            beside, below = ("", lines) if len(value) > _VALUE else (lines[0], lines[1:])
        gap = " " * (2 if len(value) > _VALUE else 1)
        print_line(console, Text(f"  {label:<11} ").append(f"{value:<{_VALUE}}{gap}").append(beside, style="dim"))
        for line in below:
            print_line(console, Text(indent).append(line, style="dim"))


def print_table(console: Console, name: str, rows: Iterator[tuple[str, str, str]]) -> None:
    print_head(console, name)
    for label, value, remark in rows:
        print_line(console, Text(f"  {label:<11} ").append(f"{value:<{_VALUE}} ").append(remark, style="dim"))


def harmless(text: str) -> str:
    """``text`` of others without what a terminal would obey: control characters but ends of lines and tabs."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
