"""Draws `ranks.png` of `ranks.md` beside itself: python docs/ranks_picture.py. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

INK, PALE = "#1f2937", "#64748b"
COLOURS = ("#fde8c8", "#cfe3fb", "#d6efd2", "#e9d5ff")
LINK, HOP = "#d9480f", "#1864ab"
RANKS, LAYERS = 4, 12
COPY, COMPUTE = 4.0, 1.0
"""Lengths of a layer's copy and of its computation: with as many ranks as the one takes of the other, no link ever waits."""


def rows(axes: Axes, title: str, owner: list[int], at: float) -> None:
    """A row for each rank's link, and below it one for its computations: layer after layer, each once its copy is there."""
    axes.text(-0.6, at + RANKS + 0.15, title, fontsize=11, fontweight="bold", color=INK, ha="left", va="bottom")
    free, done = [0.0] * RANKS, 0.0
    held: dict[int, list[float]] = {rank: [] for rank in range(RANKS)}
    spots = []
    for layer, rank in enumerate(owner):
        row = at + RANKS - 1 - rank
        begun = max(free[rank], held[rank][-2] if len(held[rank]) > 1 else 0.0)
        free[rank] = begun + COPY
        axes.add_patch(Rectangle((begun, row + 0.45), COPY, 0.4, facecolor=COLOURS[rank], edgecolor=LINK, lw=0.8))
        axes.text(begun + COMPUTE / 2, row + 0.65, str(layer), ha="center", va="center", fontsize=8, color=INK)
        start = max(free[rank], done)
        done = start + COMPUTE
        held[rank].append(done)
        axes.add_patch(Rectangle((start, row + 0.1), COMPUTE, 0.3, facecolor=INK, edgecolor="none"))
        axes.text(start + COMPUTE / 2, row + 0.25, str(layer), ha="center", va="center", fontsize=7, color="white")
        spots.append((start, done, row))
    for (_, end, below), (begin, _, above) in zip(spots, spots[1:], strict=False):
        if below != above:
            arrow = {"arrowstyle": "->", "color": HOP, "lw": 1.0, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (begin, above + 0.25), (end, below + 0.25), arrowprops=arrow)
    for rank in range(RANKS):
        axes.text(-0.6, at + RANKS - 1 - rank + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9, color=PALE)
    axes.plot([done, done], [at, at + RANKS], color=LINK, lw=1.2, ls="--")
    axes.text(done + 0.15, at + 0.2, "the step ends", fontsize=8, color=LINK, va="bottom")


def main() -> None:
    figure, axes = plt.subplots(figsize=(11, 6), dpi=120)
    rows(axes, "dealt cyclically: layer i with rank i mod 4", [layer % RANKS for layer in range(LAYERS)], RANKS + 1.2)
    rows(
        axes,
        "dealt in stretches: three layers in a row, a ring of two slots each",
        [layer * RANKS // LAYERS for layer in range(LAYERS)],
        0.0,
    )
    axes.add_patch(Rectangle((0, -0.75), 0.8, 0.3, facecolor=COLOURS[0], edgecolor=LINK, lw=0.8))
    axes.text(1.0, -0.6, "a layer's weights on the link", fontsize=8, color=PALE, va="center")
    axes.add_patch(Rectangle((8.2, -0.75), 0.8, 0.3, facecolor=INK))
    axes.text(9.2, -0.6, "the layer is computed", fontsize=8, color=PALE, va="center")
    axes.annotate("", (15.6, -0.6), (14.8, -0.6), arrowprops={"arrowstyle": "->", "color": HOP, "lw": 1.0})
    axes.text(15.8, -0.6, "a hidden state hops", fontsize=8, color=PALE, va="center")
    axes.set_xlim(-2.6, 33)
    axes.set_ylim(-1.0, 2 * RANKS + 2.0)
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("ranks.png"), bbox_inches="tight")


if __name__ == "__main__":
    main()
