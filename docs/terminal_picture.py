"""Draws a terminal's screen: `tmux capture-pane -e -p | python docs/terminal_picture.py docs/chat.png`. It needs matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from rich.ansi import AnsiDecoder
from rich.color_triplet import ColorTriplet
from rich.console import Console
from rich.terminal_theme import MONOKAI

INCH_A_COLUMN, INCH_A_LINE, POINTS = 0.085, 0.19, 10


def draw(screen: str, path: Path) -> None:
    """``screen`` with its ANSI colours, a line of it a line of the picture."""
    texts = list(AnsiDecoder().decode(screen.rstrip("\n")))
    columns = max(text.cell_len for text in texts) + 2
    figure = Figure(figsize=(columns * INCH_A_COLUMN, (len(texts) + 1) * INCH_A_LINE), facecolor=_hex(MONOKAI.background_color))
    console = Console(color_system="truecolor")
    for row, text in enumerate(texts):
        column = 1
        for segment in text.render(console):
            style = segment.style
            colour = MONOKAI.foreground_color
            if style is not None and style.color is not None:
                colour = style.color.get_truecolor(MONOKAI)
            if style is not None and style.dim:
                colour = tuple(c * 6 // 10 for c in colour)
            for letter in segment.text:
                if letter.strip():
                    figure.text(
                        column / columns,
                        1 - (row + 1) / (len(texts) + 1),
                        letter,
                        family="DejaVu Sans Mono",
                        size=POINTS,
                        weight="bold" if style is not None and style.bold else "normal",
                        color=_hex(colour),
                        va="center",
                    )
                column += 1
    figure.savefig(path, dpi=130)


def _hex(colour: tuple[int, int, int]) -> str:
    return ColorTriplet(*colour).hex


if __name__ == "__main__":
    draw(sys.stdin.read(), Path(sys.argv[1]))
