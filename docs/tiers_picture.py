"""Draws `tiers.png` of `glossary.md` beside itself, from the plan file of a dense model on a GPU. Needs matplotlib.

planner solve hardware=rtx5080 model=llama70b out=70b.yaml
python docs/tiers_picture.py 70b.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from penstock.planner.common.measures import GB, show_bytes, show_seconds
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan
from penstock.planner.contract.plan.tier_fill import Fill, fills
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.prices.sizes import dram_slot_bytes, unit_vram_bytes

INK, FAINT, PALE, LINE, FREE = "#1f2937", "#4b5563", "#f8fafc", "#94a3b8", "#ffffff"
HOME = {Tier.vram: "#8ab4f0", Tier.dram: "#f6c177", Tier.ssd: "#8fcf9f"}
"""Colour of the weights that live in a tier."""
SLOT, KV, REST = "#fdf3c7", "#c9b3ea", ("#cbd5e1", "#e2e8f0")
H2D, READ = "#d9480f", "#1864ab"

LEGEND = (
    (HOME[Tier.vram], "stays in VRAM", 16), (HOME[Tier.dram], "stays in DRAM", 16),
    (HOME[Tier.ssd], "read from the SSD for every token", 31), (SLOT, "slot", 8.5), (KV, "KV", 7.5), (REST[0], "everything else", 0),
)  # fmt: skip
"""Colour, meaning, width."""

LEFT, WIDTH, HEIGHT = 15.0, 83.0, 6.0
"""Of the bars: where they begin, how wide a whole tier is, how high."""
BOTTOM = {Tier.vram: 42.5, Tier.dram: 23.5, Tier.ssd: 4.5}
TOP = 63.5
"""Of the strip of units; its legend is above."""
NAMES = {Tier.vram: "VRAM", Tier.dram: "DRAM", Tier.ssd: "SSD"}


class Part(NamedTuple):
    """Bytes side by side in a tier's bar: ``cells`` of equal kind, each its own bytes, in one colour."""

    name: str
    cells: Sequence[int]
    colour: str
    passing: bool = False
    """Slots that hold one unit or layer after the other."""

    @property
    def nbytes(self) -> int:
        return sum(self.cells)


Where = dict[Tier, dict[str, tuple[float, float]]]
"""Where each part of each tier begins and ends."""


def parts(plan: Plan, fill: Fill) -> list[Part]:
    """What a tier holds, slots that weights pass through first, then what stays, then the rest in the order of size."""
    place, items = plan.placement, dict(fill.items)
    first: list[Part] = []
    if fill.tier is Tier.vram:
        slots = [unit_vram_bytes(size) for count, size in place.ring_classes.values() for _ in range(count)]
        kept = [unit_vram_bytes(place.unit_bytes(unit)) for unit, tier in place.units if tier is Tier.vram]
        first = [Part("ring", slots, SLOT, True), Part("residents", kept, HOME[Tier.vram])]
        del items["ring"], items["residents"]
    elif fill.tier is Tier.dram:
        kept = len(place.resident_layers)
        sizes = [[dram_slot_bytes(place)] * count for count in (place.dram_slots - kept, kept)]
        first = [Part("passing", sizes[0], HOME[Tier.ssd], True), Part("kept", sizes[1], HOME[Tier.dram])]
        del items["layer_cache"]
    else:
        read = place.ssd_bytes_per_pass
        first = [Part("streamed", [read], HOME[Tier.ssd]), Part("weights", [items.pop("weights") - read], "#dfe7e1")]
    rest = [Part(name.replace("_", " "), [n], KV if name == "kv" else REST[k % 2]) for k, (name, n) in enumerate(items.items())]
    return first + rest


def strip(axes: Axes, plan: Plan) -> None:
    """Every unit of a pass: layers from left to right, attention over FFN, heights by bytes, coloured by the tier that it lives in."""
    place, model = plan.placement, plan.model
    each, top, high = WIDTH / model.layers, TOP, 7.5
    scale = high / (max(model.attn_bytes) + max(model.ffn_bytes))
    for layer in range(model.layers):
        below = top
        for tier, nbytes in ((place.attn[layer], model.attn_bytes[layer]), (place.ffn[layer], model.ffn_bytes[layer])):
            below -= nbytes * scale
            axes.add_patch(Rectangle((LEFT + layer * each, below), each, nbytes * scale, facecolor=HOME[tier], edgecolor="white", lw=0.8))
    for layer in (*range(0, model.layers - 5, 10), model.layers - 1):
        _text(axes, LEFT + (layer + 0.5) * each, top - high - 1.3, str(layer), 7.5, ha="center")
    attn = max(model.attn_bytes) * scale
    for name, at in (("attention", top - attn / 2), ("FFN", top - attn - (high - attn) / 2)):
        _text(axes, LEFT - 0.8, at, name, 7.5, ha="right")
    _text(axes, 2.2, top - high / 2 - 0.3, "Units", 12, weight="bold")
    _text(axes, 2.2, top - high - 1.3, "of layer", 7.5)
    at = 2.2
    for colour, meaning, wide in LEGEND:
        axes.add_patch(Rectangle((at, top + 3.2), 2.2, 1.6, facecolor=colour, edgecolor=LINE, lw=0.6))
        _text(axes, at + 2.9, top + 4.0, meaning, 8)
        at += wide


def bar(axes: Axes, plan: Plan, fill: Fill) -> dict[str, tuple[float, float]]:
    """A tier, filled to scale; where each part begins and ends."""
    bottom, at, found = BOTTOM[fill.tier], LEFT, {}
    look = {"boxstyle": "round,pad=0,rounding_size=0.8", "facecolor": PALE, "edgecolor": LINE, "linewidth": 0.9}
    axes.add_patch(FancyBboxPatch((1, bottom - 3.6), 98.4, HEIGHT + 6.0, **look))
    axes.add_patch(Rectangle((LEFT, bottom), WIDTH, HEIGHT, facecolor=FREE, edgecolor=LINE, lw=0.9))
    for part in parts(plan, fill):
        begin = at
        for cell in part.cells:
            wide = cell / fill.capacity_bytes * WIDTH
            line = {"edgecolor": INK if part.passing else "white", "lw": 0.6 if part.passing else 0.5}
            axes.add_patch(Rectangle((at, bottom), wide, HEIGHT, facecolor=part.colour, **line))
            at += wide
        found[part.name] = (begin, at)
    axes.add_patch(Rectangle((LEFT, bottom), WIDTH, HEIGHT, facecolor="none", edgecolor=LINE, lw=0.9))
    _text(axes, 2.2, bottom + HEIGHT / 2 + 1.1, NAMES[fill.tier], 13, weight="bold")
    _text(axes, 2.2, bottom + HEIGHT / 2 - 1.9, show_bytes(fill.capacity_bytes), 8.5)
    found["free"] = (at, LEFT + WIDTH)
    return found


def inside(plan: Plan, fill: Fill) -> dict[str, str]:
    """What stands in the largest part of a tier's bar."""
    sizes = {part.name: show_bytes(part.nbytes) for part in parts(plan, fill)}
    if fill.tier is Tier.vram:
        return {"residents": f"residents, {sizes['residents']}"}
    if fill.tier is Tier.dram:
        return {"kept": f"cap: {len(plan.placement.resident_layers)} layers that stay, {sizes['kept']}"}
    return {"free": f"free, {show_bytes(fill.free_bytes)}"}


def notes(axes: Axes, plan: Plan, where: Where) -> None:
    """What stands below the bars, beside the arrows' heads."""
    d, place = plan.decisions, plan.placement
    ahead, dram, kv = d.weights.vram.prefetch_distance, d.weights.dram, d.kv
    right = where[Tier.dram]["kept"][0]
    ring = f"ring: {d.weights.vram.slots} slots, {ahead} units are copied ahead"
    passing = f"{place.dram_slots - len(place.resident_layers)} slots, up to the HWM of {dram.hwm_layers}: layers are read ahead"
    _text(axes, right + 4.5, BOTTOM[Tier.vram] - 1.9, ring, 8)
    _text(axes, right, BOTTOM[Tier.dram] - 1.9, passing, 8)
    read, layers = show_bytes(place.ssd_bytes_per_pass), len(place.ssd_layers)
    checkpoint = f"the checkpoint, {show_bytes(plan.model.weight_bytes)}: once at the start, {read} of {layers} layers for every token"
    _text(axes, LEFT, BOTTOM[Tier.ssd] - 1.9, checkpoint, 8)
    for tier, part, text in ((Tier.vram, "kv", f"KV: {kv.vram_pages} pages of {kv.page_tokens} tokens"),
                             (Tier.dram, "embedding head", "embedding table, LM head")):  # fmt: skip
        middle = sum(where[tier][part]) / 2
        axes.plot([middle] * 2, [BOTTOM[tier], BOTTOM[tier] - 1.0], color=FAINT, lw=0.8)
        _text(axes, min(LEFT + WIDTH, middle + 2), BOTTOM[tier] - 1.9, text, 8, ha="right")


def moves(axes: Axes, plan: Plan, where: Where) -> None:
    """The two links, from slot to slot, with what they carry for one token."""
    p, w = plan.prediction, plan.decisions.weights
    ring, passing, kept = where[Tier.vram]["ring"], where[Tier.dram]["passing"], where[Tier.dram]["kept"]
    streamed = where[Tier.ssd]["streamed"]
    h2d, ssd = p.decode_stages[Resource.h2d], p.decode_stages[Resource.ssd]
    for begin in (sum(passing) / 2, kept[0] + 3.0):
        _arrow(axes, (begin, BOTTOM[Tier.dram] + HEIGHT), (min(begin, ring[1] - 1), BOTTOM[Tier.vram]), H2D)
    said = f"H2D: {show_bytes(p.h2d_bytes_per_token)} a token at {p.h2d_bytes_per_token / h2d / GB:.3g} GB/s: {show_seconds(h2d)}"
    detail = f"chunks of up to {show_bytes(w.h2d.chunk_bytes)}, {w.h2d.in_flight} in flight"
    _said(axes, kept[0] + 5.5, (BOTTOM[Tier.dram] + HEIGHT + BOTTOM[Tier.vram] - 3.6) / 2 + 1.2, said, detail, H2D)
    _arrow(axes, (sum(streamed) / 2, BOTTOM[Tier.ssd] + HEIGHT), (sum(streamed) / 2, BOTTOM[Tier.dram]), READ)
    said = f"SSD read: {show_bytes(p.ssd_bytes_per_token)} a token at {p.ssd_bytes_per_token / ssd / GB:.3g} GB/s: {show_seconds(ssd)}"
    detail = f"blocks of {show_bytes(w.ssd.block_bytes)}, {w.ssd.queue_depth} at once"
    _said(axes, kept[0] + 5.5, (BOTTOM[Tier.ssd] + HEIGHT + BOTTOM[Tier.dram] - 3.6) / 2 + 1.2, said, detail, READ)


def draw(axes: Axes, plan: Plan) -> None:
    strip(axes, plan)
    where = {}
    for fill in fills(plan):
        tier = fill.tier
        found = where[tier] = bar(axes, plan, fill)
        for part, text in inside(plan, fill).items():
            _text(axes, sum(found[part]) / 2, BOTTOM[tier] + HEIGHT / 2, text, 9, ha="center")
    notes(axes, plan, where)
    moves(axes, plan, where)


def _said(axes: Axes, x: float, y: float, said: str, detail: str, colour: str) -> None:
    _text(axes, x, y + 1.1, said, 9.5, color=colour, weight="bold")
    _text(axes, x, y - 1.1, detail, 8, color=colour)


def _text(axes: Axes, x: float, y: float, text: str, size: float, **look: str) -> None:
    axes.text(x, y, text, size=size, **{"color": INK, "va": "center", **look})


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "lw": 2.2, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 14}
    axes.annotate("", end, start, arrowprops=style)


if __name__ == "__main__":
    figure = plt.figure(figsize=(9.0, 6.3), dpi=200)  # to be shown at 900 pixels
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 100), ylim=(0, 70))
    axes.axis("off")
    draw(axes, read_plan(Path(sys.argv[1])))
    figure.savefig(Path(__file__).with_name("tiers.png"))
