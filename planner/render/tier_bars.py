"""What lies in each tier, as bars filled to scale."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

from rich.console import Console
from rich.text import Text

from penstock.planner.common.console import WIDTH, print_head, print_line
from penstock.planner.common.measures import GB, show_bytes
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.tier_fill import fills
from penstock.planner.contract.prices.memory_law import LEFT_ALONE
from penstock.planner.render.whereabouts import beside_card, computed_by

_BAR = 58
_GLYPHS = "█▓▒░▚▪▫◦▞◆◇○"
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_FREE, _KEPT = "·", "x"


def print_tiers(plan: Plan, console: Console) -> None:
    print_head(
        console, "Tiers", ", each filled to scale" + ("; VRAM of the fullest card" if plan.ranks.count > 1 and plan.hardware.gpu else "")
    )
    for fill in fills(plan):
        bar, legend = _bar(fill.items, fill.capacity_bytes)
        print_line(console, Text(f"  {fill.tier.upper():<5}").append(bar).append(f" {_scale(fill.taken_bytes, fill.capacity_bytes)}"))
        for text in legend:
            print_line(console, Text(" " * 7).append(text))
    if beside_card(plan):
        _print_computed(plan, console)


def _scale(taken_bytes: int, capacity_bytes: int) -> str:
    """Both with as many decimals, four digits of the capacity: what is taken never looks like more than there is."""
    capacity = capacity_bytes / GB
    decimals = max(0, 4 - len(str(int(capacity)))) if capacity >= 1 else 3
    return f"{taken_bytes / GB:.{decimals}f}/{capacity:.{decimals}f} GB"


def _print_computed(plan: Plan, console: Console) -> None:
    """Who computes a decode step, where that is more than one."""
    rows = plan.decisions.weights.host.rows
    where = " on rank 0" if plan.ranks.count > 1 else ""
    print_head(console, "Computed", f" with{where}, in a decode step of up to {rows} row{'s' * (rows != 1)}")
    parts = computed_by(plan)
    bar, legend = _bar(parts, sum(parts.values()))
    print_line(console, Text("  step ").append(bar).append(f" {sum(parts.values()) / GB:.3g} GB"))
    for text in legend:
        print_line(console, Text(" " * 7).append(text))


def _bar(use: Mapping[str, int], capacity: int) -> tuple[Text, list[Text]]:
    """The bar of one tier and the lines of its legend. Cells are shared out by cumulated bytes, so they never overflow."""
    bar, legend, line = Text(), [], Text()
    total, end = 0, 0
    looks = zip(_GLYPHS, cycle(_COLOURS), strict=False)
    for item, nbytes in use.items():
        glyph, colour = (_KEPT, "dim") if item in LEFT_ALONE else next(looks)
        total += nbytes
        cells = min(_BAR, round(_BAR * total / capacity)) if capacity else 0
        bar.append(glyph * (cells - end), colour)
        end = max(end, cells)
        entry = Text(glyph, colour).append(f" {item.replace('_', ' ')} {show_bytes(nbytes)}  ", "default")
        if len(line) + len(entry) > WIDTH - 8:
            legend.append(line)
            line = Text()
        line.append(entry)
    bar.append(_FREE * (_BAR - end), "dim")
    return bar, [*legend, line]
