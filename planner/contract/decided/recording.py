"""When a decode step can be recorded, so that the host issues it at once: one rule for plans, their notes and runs."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.common.measures import ALIGN, align_up
from penstock.planner.contract.decided.placement import Placement
from penstock.planner.contract.given.formats import FORMATS
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import OWN_ATTENTION, ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind

MOST_STAGED_BYTES = 128 << 20
"""One token's experts in INT4 of the larger models (8 of 9 MB). Copying more takes a card as long as launching them takes the host."""


def never_recorded(model: ModelSpec) -> str | None:
    """Why no step of ``model`` is recorded, wherever its weights lie; None where one can be."""
    if model.slices > 1:
        return "experts of which every rank has a slice wait for all ranks"
    if model.state_bytes:
        return "some layers keep a state beside K and V"
    if model.model_type in OWN_ATTENTION:
        return f"{model.model_type} models attend by code of their own"
    return None


def records_whole(model: ModelSpec) -> bool:
    """Whether a step of ``model`` that is recorded is one launch. Where routers choose experts, which the host has to bring, it is a launch
    a layer: what lies between one layer's experts and the next layer's."""
    return model.experts is None


def staged_bytes(model: ModelSpec, tokens: int) -> int:
    """VRAM into which a recorded step over ``tokens`` tokens copies the experts of a layer, which kernels then find in one place; 0 where
    kernels find them where they lie, where there are several tokens, and for more than ``MOST_STAGED_BYTES``."""
    if model.experts is None or tokens > 1 or _found_where_they_lie(model):
        return 0
    nbytes = model.experts.top_k * (align_up(model.experts.expert_bytes) + ALIGN)  # tensors begin at multiples of 256 bytes
    return nbytes if nbytes <= MOST_STAGED_BYTES else 0


def are_tabled(model: ModelSpec, tokens: int) -> bool:
    """Whether a recorded step over ``tokens`` tokens has the experts of a layer recorded, too."""
    return tokens == 1 and (_found_where_they_lie(model) or staged_bytes(model, tokens) > 0)


def come_together(gpu: bool, tokens: int) -> bool:
    """Whether a layer computes with all experts of a pass over ``tokens`` tokens behind the last of them: with those of one token a card
    does. Else each is computed with as it comes."""
    return gpu and tokens == 1


def _found_where_they_lie(model: ModelSpec) -> bool:
    return all(unit.format.grouped or unit.format.name in FORMATS for unit in model.of_kind(UnitKind.expert))


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


def reads_layers(placement: Placement) -> bool:
    """Whether each pass of one rank alone reads layers from the SSD. The interpreter, which launches its steps, hands FFN units over to the
    CPU there; those of several ranks are not handed over where the SSD is read."""
    return bool(placement.ssd_layers) and placement.model.dealt is None


def prompts_never_recorded(hardware: HardwareProfile, model: ModelSpec) -> str | None:
    """Why no layer of a prompt of ``model`` is recorded around its attention, wherever its weights lie; None where one can be."""
    if hardware.gpu is None:
        return "the model computes on the CPU"
    if (why := never_recorded(model)) is not None:
        return why
    if not records_whole(model):
        return "routers choose experts"
    return None if hardware.gpu.prompt_piece_s else "hardware.gpu.prompt_piece_s is not measured"


def prompts_launched_because(hardware: HardwareProfile, placement: Placement, kv_outside: int) -> str | None:
    """Why layers of a prompt by ``placement`` are launched kernel after kernel; None where all can be recorded around their attention.
    ``kv_outside``: see :func:`launched_because`. Hops between ranks lie between layers, so that whoever launches these may record them."""
    if (why := launched_because(placement, kv_outside)) is not None:
        return why
    if streaming := len(placement.streamed_units):
        return "a unit streams" if streaming == 1 else f"{streaming} units stream"
    return prompts_never_recorded(hardware, placement.model)


def serves_prompt(recorded_tokens: int, tokens: int) -> bool:
    """Whether a pass or a part of ``tokens`` is launched as one of ``recorded_tokens`` was recorded: a card computes for all of these."""
    return recorded_tokens // 2 < tokens <= recorded_tokens


def hops_launched(hardware: HardwareProfile, model: ModelSpec) -> str | None:
    """Why the host launches the hops of a ``model`` that is dealt; None where a recorded step holds them, or there are none."""
    if model.dealt is None:
        return None
    if hardware.hosts > 1:
        return "hidden states go from host to host"
    return None if hardware.links.word_hop_s else "hidden states go from rank to rank, and hardware.links.word_hop_s is not measured"


def can_record(hardware: HardwareProfile, model: ModelSpec) -> bool:
    """Whether ``hardware`` records steps of ``model``, as a whole or in pieces, where its weights and its KV lie right."""
    if hardware.gpu is None or not all(card.layer_kernels_s for card in (hardware.gpu, *hardware.round_cards)):
        return False
    return never_recorded(model) is None and hops_launched(hardware, model) is None


def launched_hands_over(hardware: HardwareProfile, placement: Placement) -> bool:
    """Whether a step that is launched kernel by kernel has the CPU compute FFN units: of one rank that :func:`reads_layers`, and of several
    whose steps are never recorded."""
    dealt = placement.model.dealt is not None
    return reads_layers(placement) or (dealt and not can_record(hardware, placement.model))


def launching(hardware: HardwareProfile, model: ModelSpec) -> HardwareProfile:
    """``hardware`` where steps of ``model`` are launched kernel by kernel. A card of several ranks has its kernels queued while others
    compute, so they take as long there as in a recorded step; their hops are launched, too."""
    if model.dealt is not None:
        return replace(hardware, links=replace(hardware.links, word_hop_s=0.0))
    return replace(hardware, gpu=hardware.gpu and replace(hardware.gpu, layer_kernels_s=0.0))
