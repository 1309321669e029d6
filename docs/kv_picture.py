"""Draws `kv.png` of `kv.md` beside itself: python docs/kv_picture.py. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

INK, PALE, LINE = "#1f2937", "#f8fafc", "#94a3b8"
WEIGHTS, RUNNING, KEPT = "#fde8c8", "#cfe3fb", "#d6efd2"
H2D, D2H, READ, WRITE, INSIDE = "#d9480f", "#2b8a3e", "#1864ab", "#862e9c", "#64748b"


class Box(NamedTuple):
    """``title`` in bold over ``text``; left, bottom, width, height."""

    title: str
    text: str
    at: tuple[float, float, float, float]
    colour: str


class Move(NamedTuple):
    """An arrow, at ``both`` ends on demand; ``label`` beside its middle, to the right with ``side`` 1, to the left with -1."""

    start: tuple[float, float]
    end: tuple[float, float]
    colour: str
    label: str = ""
    side: int = 1
    both: bool = False


TIERS = (("VRAM", "", 66, 25), ("DRAM", "page-locked\narena", 34.5, 18), ("SSD", "", 6, 16.5))
"""Name, remark, bottom, height."""
COLUMNS = (("Weights", 12, 22), ("KV of the running batch", 36, 33), ("KV kept for prompts to come", 71, 28))
"""Title, left, width."""
LEGEND = (
    (3, "H2D copy", H2D),
    (17, "D2H copy", D2H),
    (31, "SSD read", READ),
    (45, "SSD write", WRITE),
    (59, "within a tier; the pool and L1 share pages, uncopied", INSIDE),
)
"""Left, text, colour."""

BOXES = (
    Box("residents", "units for\nthe whole run", (13, 69, 9.5, 19), WEIGHTS),
    Box("ring", "streamed\nunits", (23.5, 69, 9.5, 19), WEIGHTS),
    Box("slots", "up to 3 layers in transit,\none of them read\nby attention", (37, 69, 19.5, 19), RUNNING),
    Box("pool", "pages of\nsequences", (58, 69, 10, 19), RUNNING),
    Box("L1", "pages of the pool, no sequence's", (73, 80, 25, 8), KEPT),
    Box("bounce", "pages\nin transit", (73, 67.5, 15.5, 9.5), KEPT),
    Box("layer cache", "pinned layers,\nlayers read ahead", (13, 37, 20, 13), WEIGHTS),
    Box("slots", "up to 3\nlayers", (37, 37, 9.5, 13), RUNNING),
    Box("regions", "one for each layer\nthat lies here", (48.5, 37, 19.5, 13), RUNNING),
    Box("L2", "pages, each with a checksum", (73, 37, 25, 13), KEPT),
    Box("checkpoint", "or packed store", (13, 9, 20, 10.5), WEIGHTS),
    Box("scratch file", "no name, gone\nwith the run", (37, 9, 15.5, 10.5), RUNNING),
    Box("L3", "files in kv.dir, with checksums;\nstay for later runs", (73, 9, 25, 10.5), KEPT),
)
MOVES = (
    Move((28.2, 50), (28.2, 69), H2D, "ahead of\ncompute", -1),
    Move((23, 19.5), (23, 37), READ, "ahead", -1),
    Move((39.5, 50), (39.5, 69), H2D),
    Move((43.5, 69), (43.5, 50), D2H),
    Move((51, 50), (51, 69), H2D, "ahead of\nattention", -1),
    Move((54.5, 69), (54.5, 50), D2H, "new tokens,\nbehind it"),
    Move((39.5, 19.5), (39.5, 37), READ, "ahead", -1),
    Move((43.5, 37), (43.5, 19.5), WRITE, "new tokens, behind"),
    Move((76, 50), (76, 67.5), H2D, "restored", -1),
    Move((84, 67.5), (84, 50), D2H, "computed, or\nevicted"),
    Move((95, 80), (95, 50), D2H),
    Move((76, 19.5), (76, 37), READ, "restored"),
    Move((95, 37), (95, 19.5), WRITE, "computed", -1),
    Move((73, 84), (68, 84), INSIDE, both=True),
    Move((73, 72), (68, 72), INSIDE, both=True),
    Move((73, 43.5), (68, 43.5), INSIDE, both=True),
)


def draw(axes: Axes) -> None:
    for name, remark, bottom, height in TIERS:
        _panel(axes, (1.0, bottom, 98.5, height), PALE)
        axes.text(2.2, bottom + height / 2 + (2.4 if remark else 0), name, size=13, weight="bold", color=INK, va="center")
        axes.text(2.2, bottom + height / 2 - 2.6, remark, size=7.5, color=INK, va="center")
    for title, left, width in COLUMNS:
        axes.text(left + width / 2, 93.5, title, size=10, weight="bold", color=INK, ha="center", va="center")
    for box in BOXES:
        _panel(axes, box.at, box.colour)
        left, bottom, width, height = box.at
        middle = bottom + height / 2
        lines = box.text.count("\n") + 1
        axes.text(left + width / 2, middle + 0.5 + lines, box.title, size=9.5, weight="bold", color=INK, ha="center", va="center")
        axes.text(left + width / 2, middle - 0.8 + 0.8 * lines, box.text, size=8, color=INK, ha="center", va="top")
    for move in MOVES:
        _arrow(axes, move)
    for left, what, colour in LEGEND:
        _arrow(axes, Move((left, 2.5), (left + 4, 2.5), colour))
        axes.text(left + 4.6, 2.5, what, size=8, color=INK, va="center")


def _panel(axes: Axes, at: tuple[float, float, float, float], colour: str) -> None:
    look = {"boxstyle": "round,pad=0,rounding_size=0.8", "facecolor": colour, "edgecolor": LINE, "linewidth": 0.9}
    axes.add_patch(FancyBboxPatch(at[:2], *at[2:], **look))


def _arrow(axes: Axes, move: Move) -> None:
    head = "<|-|>" if move.both else "-|>"
    style = {"arrowstyle": head, "color": move.colour, "lw": 2.0, "shrinkA": 1, "shrinkB": 1, "mutation_scale": 13}
    axes.annotate("", move.end, move.start, arrowprops=style)
    x, y = (move.start[0] + move.end[0]) / 2 + move.side * 1.1, (move.start[1] + move.end[1]) / 2
    axes.text(x, y, move.label, size=8, color=move.colour, ha="left" if move.side > 0 else "right", va="center")


if __name__ == "__main__":
    figure = plt.figure(figsize=(9.0, 6.2), dpi=200)  # to be shown at 900 pixels
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 100), ylim=(0, 97))
    axes.axis("off")
    draw(axes)
    figure.savefig(Path(__file__).with_name("kv.png"))
