"""What fetching experts before their router has spoken can gain."""

from __future__ import annotations

from dataclasses import dataclass

from planner.decisions import ExpertSlots, SsdReads
from planner.hardware import HardwareProfile
from planner.model import Experts, ModelSpec
from planner.moe.misses import visit
from planner.predict.stages import decode_compute_s, expert_copy_s, ssd_gbps
from planner.units import GB
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
    it hides less than a piece, but all that are named where routers of further layers are asked, too. None where all are kept, or where a
    batch touches nearly all, which then pass in order."""
    experts = model.experts
    if experts is None or (slots.vram_slots if hardware.gpu else slots.dram_slots) >= experts.units or visit(experts, batch).dense:
        return 0
    if experts.foreseen:
        return experts.top_k
    ahead = foresight(hardware, model, experts, workload, slots, ssd, batch)
    return min(experts.top_k, max(1, int(ahead.hidden_bytes // experts.expert_bytes))) if ahead.pays else 0
