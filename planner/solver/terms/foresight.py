"""What fetching experts before their router has spoken can gain."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import ExpertSlots, MissedExperts, SsdReads
from penstock.planner.contract.experts.expert_misses import visit
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import Experts, ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.stages import decode_compute_s, expert_copy_s, ssd_gbps


@dataclass(frozen=True)
class Foresight:
    """One layer of a decode step against one expert in transit."""

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


@dataclass(frozen=True)
class DecodeStep:
    """One of ``batch`` sequences of a MoE model: what of its experts' way is worth going before their router has spoken."""

    hardware: HardwareProfile
    model: ModelSpec
    experts: Experts
    workload: Workload
    batch: int

    def nearest(self, slots: ExpertSlots, ssd: SsdReads) -> Foresight:
        """On the link that brings experts to where they are computed: to the device, or from the SSD without one."""
        gpu = self.hardware.gpu
        if gpu is None:
            return self.reading(ssd, ssd.block_bytes)
        return Foresight(self.experts.expert_bytes, expert_copy_s(gpu, self.experts, slots.chunk_bytes), self._layer_s, slots.chunk_bytes)

    def reading(self, ssd: SsdReads, piece_bytes: int) -> Foresight:
        """From the SSD, in pieces that are not given up once they have begun."""
        read_s = self.experts.expert_bytes / ssd_gbps(self.hardware, ssd.block_bytes, ssd.queue_depth) / GB
        return Foresight(self.experts.expert_bytes, read_s, self._layer_s, piece_bytes)

    @property
    def _layer_s(self) -> float:
        return decode_compute_s(self.hardware, self.model, self.workload, self.batch) / self.model.layers

    def fetched_ahead(self, slots: ExpertSlots, ssd: SsdReads) -> int:
        """How many experts of the coming layer to fetch ahead into the tier where they are computed.

        None where the CPU computes a part of what is missed: a layer would wait for a copy that has begun, where the CPU is done sooner,
        and copies that nobody uses take its bus. In simulations of twelve machines with a split this never lost, and gained up to 5 %.
        Routers that are asked beforehand name what is used.
        """
        gpu = self.hardware.gpu is not None
        if gpu and slots.host is MissedExperts.split and not self.experts.foreseen:
            return 0
        return self.worth_fetching(slots.vram_slots if gpu else slots.dram_slots, self.nearest(slots, ssd))

    def worth_fetching(self, slots: int, ahead: Foresight) -> int:
        """How many experts of the coming layer to fetch ahead into a tier of ``slots``.

        * As many as a layer's compute hides; one if it hides a part of one; none if it hides less than a piece.
        * All that are named, if routers of further layers are asked, too.
        * None if all experts are kept, or if a batch touches nearly all, which then pass in order.
        * None of slices: links have time at different moments, so that ranks would come to keep different ones, and wait for each other.
        """
        experts = self.experts
        if slots >= experts.units or visit(experts, self.batch).dense or self.model.slices > 1:
            return 0
        if experts.foreseen:
            return experts.top_k
        return min(experts.top_k, max(1, int(ahead.hidden_bytes // experts.expert_bytes))) if ahead.pays else 0
