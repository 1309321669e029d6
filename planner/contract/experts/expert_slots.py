"""How a tier's expert slots are shared between the layers: the same for planner, simulator and runtime."""

from __future__ import annotations

from penstock.planner.contract.decided.placement import even
from penstock.planner.contract.given.model import Experts

LEAST_PASSING = 3
"""Slots that experts pass through at least: one is computed with, one has arrived, one is on its way."""


def fewest_slots(experts: Experts) -> int:
    """Slots without which a tier that experts pass through cannot work: one token's experts of a layer, so that no copy of a decode step
    waits for the kernels before it to leave a slot."""
    return min(max(LEAST_PASSING, experts.top_k), experts.units)


def transit_slots(experts: Experts, slots: int) -> int:
    """Of ``slots``, those that keep nothing: none where every expert has a slot of its own."""
    return 0 if slots >= experts.units else min(slots, fewest_slots(experts))


def kept_in_all(experts: Experts, slots: int) -> int:
    """Of ``slots``, those that keep experts, over all layers."""
    return min(slots, experts.units) - transit_slots(experts, slots)


def kept_at_first(experts: Experts, vram_slots: int, dram_slots: int) -> int:
    """Different experts that both tiers keep, over all layers, when loading ends: VRAM has those that DRAM does not keep, as far as its
    slots go."""
    vram, dram = kept_slots(experts, vram_slots), kept_slots(experts, dram_slots)
    return sum(min(experts.count, vram[layer] + dram[layer]) for layer in experts.layers)


def kept_slots(experts: Experts, slots: int) -> dict[int, int]:
    """MoE layer -> slots of a tier in which it keeps experts. They differ by one at most, and the larger ones are spread evenly."""
    each, more = divmod(kept_in_all(experts, slots), len(experts.layers))
    larger = set(even(more, len(experts.layers)))
    return {layer: each + (i in larger) for i, layer in enumerate(experts.layers)}
