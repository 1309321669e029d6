"""When a decode step is recorded, so that the host issues it at once: one rule for plans, their notes and runs."""

from __future__ import annotations

from penstock.planner.contract.decided.decisions import KvPages, Tier
from penstock.planner.contract.decided.placement import Placement
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import OWN_ATTENTION, ModelSpec


def never_recorded(model: ModelSpec) -> str | None:
    """Why no step of ``model`` is recorded, wherever its weights lie; None where one can be."""
    if model.dealt is not None and model.dealt.routed:
        return "routed experts of one rank wait for those of another"
    if model.state_bytes:
        return "some layers keep a state beside K and V"
    if model.model_type in OWN_ATTENTION:
        return f"{model.model_type} models attend by code of their own"
    return None


def records_whole(model: ModelSpec) -> bool:
    """Whether a step of ``model`` that is recorded is one launch. Where routers choose experts, which the host has to bring, it is a launch
    a layer: what lies between one layer's experts and the next layer's."""
    return model.experts is None


def launched_because(placement: Placement, kv_outside: int) -> str | None:
    """Why decode steps by ``placement`` are launched kernel after kernel; None where a machine with Triton's attention records them.

    ``kv_outside``: layers, or pages, of running sequences' KV outside VRAM. Units that stream from DRAM are recorded with the kernels,
    unless experts stream beside them; what comes from the drive waits for the host.
    """
    if not placement.gpu:
        return "the model computes on the CPU"
    if (why := never_recorded(placement.model)) is not None:
        return why
    if placement.ssd_layers:
        return f"{len(placement.ssd_layers)} layers come from the SSD in every pass"
    if placement.streamed_units and not records_whole(placement.model):
        return f"{len(placement.streamed_units)} units stream between routed experts"
    return "KV of running sequences lies outside VRAM" if kv_outside else None


def hops_launched(hardware: HardwareProfile, model: ModelSpec) -> str | None:
    """Why the host launches the hops of a ``model`` that is dealt; None where a recorded step holds them, or there are none."""
    if model.dealt is None:
        return None
    if hardware.hosts > 1:
        return "hidden states go from host to host"
    return None if hardware.links.word_hop_s else "hidden states go from rank to rank, and hardware.links.word_hop_s is not measured"


def can_record(hardware: HardwareProfile, model: ModelSpec) -> bool:
    """Whether ``hardware`` records steps of ``model``, as a whole or in pieces, where its weights and its KV lie right."""
    if hardware.gpu is None or not hardware.gpu.layer_kernels_s:
        return False
    return never_recorded(model) is None and hops_launched(hardware, model) is None


def is_recorded(hardware: HardwareProfile, placement: Placement, kv: KvPages) -> bool:
    """Whether decode steps of a plan are recorded."""
    return can_record(hardware, placement.model) and launched_because(placement, kv.of(Tier.dram) + kv.of(Tier.ssd)) is None
