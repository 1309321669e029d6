"""Progress bars on stderr: drawn on a terminal, nothing at all elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def bar_console() -> Console:
    """stderr, silent where it is no terminal."""
    console = Console(stderr=True, highlight=False)
    console.quiet = not console.is_terminal
    return console


def make_bar(*columns: ProgressColumn) -> Progress:
    """A bar that goes when it is over. Off a terminal it has no thread, and prints not even the empty line that rich ends a bar with."""
    console = bar_console()
    return Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=console.quiet)
