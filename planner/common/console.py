"""The terminal that verbs print to: its width, and the lines that all of them are made of."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

WIDTH = 80
"""Columns that the output needs at most; a wider terminal is not filled."""


def make_console() -> Console:
    """A console on stdout, at most ``WIDTH`` columns, with colours only on a terminal."""
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    return console


def print_head(console: Console, name: str, rest: str = "") -> None:
    console.print()
    print_line(console, Text(name, style="bold").append(rest, style="not bold dim"))


def print_line(console: Console, text: Text) -> None:
    text.rstrip()
    console.print(text, overflow="ellipsis", no_wrap=True, crop=True)


def print_table(console: Console, name: str, rows: Iterator[tuple[str, str, str]]) -> None:
    print_head(console, name)
    for label, value, remark in rows:
        print_line(console, Text(f"  {label:<11} ").append(f"{value:<22} ").append(remark, style="dim"))
