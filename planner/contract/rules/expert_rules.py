"""Rules of the slots for routed experts."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.common.measures import ALIGN, align_up
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.experts.expert_slots import TRANSIT_SLOTS, fewest_slots
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import Experts, ModelSpec
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.contract.rules.rule import BrokenRule, out_of_range


def expert_rules(hardware: HardwareProfile, model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    slots, experts, gpu = d.experts, model.experts, hardware.gpu
    if slots is None or experts is None:
        if slots is not None or experts is not None:
            allowed = "none for a dense model" if experts is None else "an experts section for a MoE model"
            yield BrokenRule("experts section", f"experts={slots}; allowed: {allowed}; solve again")
        return
    everywhere = gpu is not None and slots.vram_slots >= experts.units
    yield from _expert_slots("vram_slots", slots.vram_slots, experts, 0 if gpu is None else None)
    yield from _expert_slots("dram_slots", slots.dram_slots, experts, None, everywhere)
    if not 0 <= slots.prefetch <= experts.top_k:
        yield out_of_range("experts.prefetch", slots.prefetch, 0, experts.top_k, ", the experts of one token")
    most = experts.top_k if gpu else 0
    if not 0 <= slots.read_ahead <= most:
        why = ", the experts of one token" if gpu else " without a GPU, where experts.prefetch is what the SSD reads"
        yield out_of_range("experts.read_ahead", slots.read_ahead, 0, most, why)
    if not 1 <= slots.in_flight <= LIMITS.expert_chunks:
        yield out_of_range("experts.in_flight", slots.in_flight, 1, LIMITS.expert_chunks)
    low, high = expert_chunk_range(hardware, experts)
    if not low <= slots.chunk_bytes <= high:
        yield out_of_range("experts.chunk_bytes", slots.chunk_bytes, low, high)


def _expert_slots(name: str, value: int, experts: Experts, only: int | None, idle: bool = False) -> Iterator[BrokenRule]:
    """``only`` is all that is allowed, where it is given; ``idle`` allows none."""
    least, most = fewest_slots(experts), experts.units
    if only is not None:
        if value != only:
            yield BrokenRule("expert slots", f"experts.{name}={value}; allowed: {only} without a GPU; set it so")
    elif value > most:
        yield BrokenRule("expert slots", f"experts.{name}={value}; allowed: at most {most}, one for each expert; set {name}={most}")
    elif value < least and not (idle and value == 0):
        why = f"one token's experts in a layer are {experts.top_k}, and {min(TRANSIT_SLOTS, most)} pass through at once"
        none = ", or 0, since VRAM has a slot for every expert" if idle else ""
        yield BrokenRule("expert slots", f"experts.{name}={value}; allowed: at least {least} ({why}){none}; set {name}={least}")


def expert_chunk_range(hardware: HardwareProfile, experts: Experts) -> tuple[int, int]:
    """Bytes of a copy of a part of an expert: at least the smallest measured one, at most the largest or a whole expert. Where an expert is
    smaller than every measured copy, a page at least."""
    whole, sizes = align_up(experts.expert_bytes), [size for size, _ in hardware.gpu.h2d.points] if hardware.gpu else [ALIGN, 2**30]
    return (min(sizes) if whole >= min(sizes) else ALIGN), max(whole, max(sizes))
