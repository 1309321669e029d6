"""The comparison as a picture: prefill and decode seconds of each system on a logarithmic scale."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from bench.peers.table import Row

CAPTION_COLUMNS = 170
LABEL_CHARACTERS = 110
"""Of a message; it may run on into the other panel, where its system has no bar."""


def draw(rows: Sequence[Row], caption: str, path: Path) -> None:
    """Write a PNG. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(1, 2, figsize=(12, 1.6 + 0.5 * len(rows)), sharey=True, layout="constrained")
    places = range(len(rows))
    titles = {"prefill_s": "prefill, seconds", "decode_s": "decode, seconds per token (times Penstock's)"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        values = [getattr(row, key) for row in rows]
        known = [v for v in values if v]
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        if known:
            axes.set_xlim(min(known) / 2, max(known) * 6)
        left = axes.get_xlim()[0]
        for place, (row, value) in enumerate(zip(rows, values, strict=True)):
            if value:
                axes.barh(place, value - left, left=left, color="tab:blue" if row.system == "penstock" else "tab:gray")
            axes.text(value or left, place, f" {_label(row, value, key)}", va="center", fontsize=8).set_in_layout(False)
        axes.set_title(title)
        axes.set_yticks(places, [row.title for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.spines[["top", "right"]].set_visible(False)
    lines = [piece for line in caption.splitlines() for piece in textwrap.wrap(line, CAPTION_COLUMNS)]
    figure.supxlabel("\n".join(lines), fontsize=8, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _label(row: Row, value: float | None, key: str) -> str:
    if row.message:
        return row.message[:LABEL_CHARACTERS] if key == "prefill_s" else ""
    if not value:
        return "-"
    times = f" ({row.times_penstock:.3g} x)" if key == "decode_s" and row.times_penstock and row.system != "penstock" else ""
    return f"{value:.3g} s{times}"
