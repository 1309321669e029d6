"""What fetching experts before their router has spoken can gain, and what a plan says of its experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.decisions import Decisions, ExpertSlots, SsdReads
from planner.experts import kept_in_all
from planner.hardware import HardwareProfile
from planner.hits import DEFAULT_SOURCE
from planner.model import Experts, ModelSpec
from planner.plan import Plan
from planner.stages import decode_compute_s, expert_copy_s, ssd_gbps
from planner.units import GB, show_bytes, show_seconds
from planner.workload import Workload


@dataclass(frozen=True)
class Foresight:
    """One layer of a decode step against one expert on the link that brings those missed: to the device, or from the SSD without one."""

    expert_bytes: int
    fetch_s: float
    layer_s: float
    """A layer's compute."""
    piece_bytes: int
    """The smallest part of an expert that moves."""

    @property
    def hidden_bytes(self) -> float:
        """The most that a layer's compute can hide."""
        return self.layer_s / self.fetch_s * self.expert_bytes

    @property
    def pays(self) -> bool:
        """Whether that is a piece at least."""
        return self.hidden_bytes >= self.piece_bytes


def foresight(
    hardware: HardwareProfile, model: ModelSpec, experts: Experts, workload: Workload, slots: ExpertSlots, ssd: SsdReads, batch: int
) -> Foresight:
    """For a decode step of ``batch`` sequences."""
    layer_s = decode_compute_s(hardware, model, workload, batch) / model.layers
    if hardware.gpu:
        return Foresight(experts.expert_bytes, expert_copy_s(hardware.gpu, experts, slots.chunk_bytes), layer_s, slots.chunk_bytes)
    read_s = experts.expert_bytes / ssd_gbps(hardware, ssd.block_bytes, ssd.queue_depth) / GB
    return Foresight(experts.expert_bytes, read_s, layer_s, ssd.block_bytes)


def expert_prefetch(hardware: HardwareProfile, model: ModelSpec, workload: Workload, slots: ExpertSlots, ssd: SsdReads, batch: int) -> int:
    """Experts of the coming layer that are worth fetching ahead: as many as a layer's compute hides, one where it hides a part, none where
    it hides less than a piece or where all are kept."""
    experts = model.experts
    if experts is None or (slots.vram_slots if hardware.gpu else slots.dram_slots) >= experts.units:
        return 0
    ahead = foresight(hardware, model, experts, workload, slots, ssd, batch)
    return min(experts.top_k, max(1, int(ahead.hidden_bytes // experts.expert_bytes))) if ahead.pays else 0


def expert_notes(plan: Plan, curve: str | None) -> Iterator[str]:
    """Sentences for the plan's notes: which curve of hits was used (``curve`` says where from, None is the default), and what prediction
    can gain. None for a dense model, or where memory keeps every expert next to the compute."""
    experts, d = plan.model.experts, plan.decisions
    if experts is None or d.experts is None or (d.experts.vram_slots if plan.hardware.gpu else d.experts.dram_slots) >= experts.units:
        return
    yield _hits(plan, d, experts, curve)
    yield _gain(plan, d, experts, d.experts)


def _hits(plan: Plan, d: Decisions, experts: Experts, curve: str | None) -> str:
    assert d.experts is not None
    tier, slots = ("VRAM", d.experts.vram_slots) if plan.hardware.gpu else ("DRAM", d.experts.dram_slots)
    each = kept_in_all(experts, slots) / len(experts.layers)
    missed = plan.predicted.experts_missed_vram if plan.hardware.gpu else plan.predicted.experts_missed_dram
    source = curve or f"{DEFAULT_SOURCE}, rescaled by the share of slots; moe.traces=FILE measures the model's own"
    return f"{tier} keeps {each:.3g} of {experts.count} experts a layer and is taken to find {1 - missed:.1%} of those visited ({source})"


def _gain(plan: Plan, d: Decisions, experts: Experts, slots: ExpertSlots) -> str:
    ahead = foresight(plan.hardware, plan.model, experts, plan.workload, slots, d.weights.ssd, d.batch)
    share = min(1.0, ahead.hidden_bytes / ahead.expert_bytes)
    way = "copied" if plan.hardware.gpu else "read"
    text = (
        f"an expert of {show_bytes(ahead.expert_bytes)} is {way} in {show_seconds(ahead.fetch_s)}, a layer computes for "
        f"{show_seconds(ahead.layer_s)}, which hides {show_bytes(ahead.hidden_bytes)} of it at most ({share:.0%})"
    )
    if slots.prefetch:
        return f"{text}: {slots.prefetch} of the coming layer {'is' if slots.prefetch == 1 else 'are'} fetched ahead; the rest is residency"
    if ahead.pays:
        return f"{text}: nothing is fetched ahead, since moe.prefetch=0"
    return f"{text}, less than a piece of {show_bytes(ahead.piece_bytes)}: prediction cannot pay, nothing is fetched ahead"
