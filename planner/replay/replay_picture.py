"""A comparison of expert policies as a picture. Matplotlib is imported only when one is drawn."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.planner.common.errors import UserError
from penstock.planner.replay.comparison import BELADY, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    BELADY: "#444444",
    "lru": "#9D9D9D",
    "lfu": "#8CA252",
    "static": "#72B7B2",
    "gating": "#EECA3B",
    "trajectory": "#B279A2",
    "markov": "#F58518",
    "lookahead": "#4C78A8",
    "mix": "#E45756",
}


def check_picture(path: Path) -> None:
    """UserError when the picture at ``path`` cannot be drawn here."""
    if path.suffix != ".png":
        raise UserError(f"plot={path}: a picture's name must end in .png; name the file so")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"plot={path}: a picture needs matplotlib, which is not installed; pip install matplotlib or leave it out")


def draw_comparison(comparison: Comparison, title: str, path: Path) -> None:
    """Draw to ``path`` what each policy finds in slots, and beside it what is there in time when it may fetch ahead."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    kept, ready = figure.subplots(1, 2, sharey=True)
    records = {BELADY: comparison.bound} | {name.value: record.kept for name, record in comparison.replays.items()}
    slots = range(comparison.routings.count + 1)
    for policy, record in records.items():
        _line(kept, list(slots), [100 * record.rate(n) for n in slots], policy)
    _line(ready, list(slots), [100 * comparison.bound.rate(n) for n in slots], BELADY)
    for policy in records:
        some = [s for s in comparison.scores() if s.policy == policy and s.recall is not None]
        if some:
            _line(ready, [s.slots for s in some], [100 * s.ready_rate for s in some], policy)
    kept.set_title("found in slots", fontsize=10)
    ready.set_title(f"found in slots or fetched ahead, up to {comparison.prefetch.most} a layer", fontsize=10)
    kept.set_ylabel("% of a token's experts")
    for axes in (kept, ready):
        axes.set_xlabel(f"slots a layer, of {comparison.routings.count} experts")
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 101)
        axes.set_xlim(0, comparison.routings.count)
        axes.legend(fontsize=8, frameon=False, loc="lower right")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    figure.savefig(path)


def _line(axes: Axes, slots: list[int], percent: list[float], policy: str) -> None:
    if policy == BELADY:
        axes.plot(slots, percent, label="Belady's bound, nothing fetched ahead", color=COLOURS[policy], linestyle="--")
    else:
        axes.plot(slots, percent, label=policy, color=COLOURS[policy], marker=".", linewidth=1.4)
