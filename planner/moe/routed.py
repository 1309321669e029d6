"""What a router's late word costs a decode step: experts cannot be fetched before they are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.contention import contention
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.moe.misses import Misses, visit
from planner.stages import Traffic
from planner.units import GB


@dataclass(frozen=True)
class Routed:
    """What of a decode step cannot overlap, since a layer's experts are known only when its router has computed.

    A layer computes attention and router, then its missed experts arrive while the others compute, then the last one computes. Between
    no expert missed (all compute, nothing fetched) and all u missed (u fetched one after the other, meanwhile u - 1 compute) the time is
    taken as linear, which is never less. So a step takes its whole compute, and for each expert missed what it is on its way, less
    (u - 1) / u of one expert's compute.

    Experts from DRAM arrive beside those from the SSD, but only those of the same layer. Of many experts a layer, each layer has its
    share of both, and the slower link counts; of one, it is the one or the other, and both add up. Shares of u experts vary by
    1 / sqrt(u), so as much of the time is taken as added up.

    Where all experts are touched, they are known before the router has spoken: then all overlaps, and nothing of this remains.
    """

    alone: float = 0.0
    """Share of the compute that nothing is fetched beside."""
    hidden_s: float = 0.0
    """Compute that goes on while one missed expert arrives."""
    apart: float = 0.0
    """Share of the time in which reads and copies do not overlap."""

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, batch: int) -> Routed:
        """For a decode step of ``batch`` sequences."""
        if model.experts is None:
            return cls()
        one = visit(model.experts, batch)
        alone, u = 1 - one.spread, one.touched
        return cls(alone, alone * (u - 1) / u * model.experts.expert_bytes / hardware.weight_gbps / GB, alone / math.sqrt(u))

    def beyond_s(self, fetch_s: float) -> float:
        """What an expert that is ``fetch_s`` on its way adds to a step."""
        return max(0.0, fetch_s - self.hidden_s)


def routed_s(hardware: HardwareProfile, model: ModelSpec, batch: int, other_s: float, missed: Misses, moved: Traffic) -> float:
    """Seconds of a decode step that its routers hold up. An expert is copied piece by piece while it is read. ``other_s`` is what lies
    between: all compute, or the copies of all that streams beside experts, which are made meanwhile, where they take longer. 0 for a
    dense model."""
    routed, both = Routed.of(hardware, model, batch), contention(hardware)
    read_s, copy_s = routed.beyond_s(moved.expert_ssd_s), routed.beyond_s(moved.expert_h2d_s)
    together_s = max(
        missed.dram * read_s + both.ssd_s_per_h2d_s * missed.vram * moved.expert_h2d_s,
        missed.vram * copy_s + both.h2d_s_per_ssd_s * missed.dram * moved.expert_ssd_s,
    )
    apart_s = missed.dram * max(read_s, copy_s) + missed.from_dram * copy_s
    return routed.alone * other_s + (1 - routed.apart) * together_s + routed.apart * apart_s
