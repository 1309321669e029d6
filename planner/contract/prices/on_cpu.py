"""What the CPU can compute beside a card, for how many rows, and why it cannot."""

from __future__ import annotations

from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.decided.recording import can_record, launched_because, reads_layers, records_whole
from penstock.planner.contract.given.formats import Dtype
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind


def host_rows_timed(hardware: HardwareProfile, model: ModelSpec) -> int:
    """The most rows for which the CPU's products with ``model``'s FFN units were timed; 0 where it cannot compute them."""
    if hardware.host is None or hardware.gpu is None or not model.ffn_activation:
        return 0
    rates = hardware.host.computing(model.compute_dtype)
    return min(rates.most_rows(unit.format) for unit in model.of_kind(UnitKind.ffn))


def no_f16_rates(hardware: HardwareProfile, model: ModelSpec) -> bool:
    """Whether ``model`` computes in F16, for which the profile has rates of the CPU beside the card in BF16 alone."""
    return model.compute_dtype is Dtype.float16 and hardware.host is not None and not hardware.host.f16_products


def head_rows_timed(hardware: HardwareProfile, model: ModelSpec) -> int:
    """The same of ``model``'s LM head, tied or not."""
    if hardware.host is None or hardware.gpu is None:
        return 0
    return hardware.host.computing(model.compute_dtype).most_rows(model.lm_head.format)


def rows_timed(hardware: HardwareProfile, model: ModelSpec, host: HostUnits) -> int:
    """The most rows for which the CPU's products with all kinds that ``host`` has units of were timed; with either where it has none."""
    timed = host_rows_timed(hardware, model), head_rows_timed(hardware, model)
    wanted = [rows for rows, count in zip(timed, (host.ffn, host.head), strict=True) if count]
    return min(wanted) if wanted else max(timed)


def no_hand_over(hardware: HardwareProfile, model: ModelSpec) -> str:
    """Why no step of ``model`` hands units to the CPU, wherever they lie; empty where one can. One rank's step does where it is recorded or
    reads layers from the SSD, that of several also where it is launched kernel by kernel for another reason."""
    if not records_whole(model) or (model.dealt is not None and model.dealt.routed):
        return "a step with routed experts is recorded in pieces"
    if model.dealt is None and not can_record(hardware, model):
        return "steps of this model cannot be recorded"
    return ""


def no_host_units(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> str:
    """Why the CPU can compute no FFN unit of a decode step by ``decisions``; empty where it can."""
    lacks = "" if host_rows_timed(hardware, model) else "the CPU has no product with these FFNs"
    if why := _no_units(hardware, model, lacks):
        return why
    placement, outside = place(model, decisions.weights, True), decisions.kv.pages - decisions.kv.vram_pages
    return "" if reads_layers(placement) and not outside else launched_because(placement, outside) or ""


def no_host_head(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> str:
    """The same of blocks of the LM head."""
    lacks = "" if head_rows_timed(hardware, model) else "the CPU has no product with this LM head"
    if why := _no_units(hardware, model, lacks or never_on_host(model)):
        return why
    return launched_because(place(model, decisions.weights, True), decisions.kv.pages - decisions.kv.vram_pages) or ""


def never_on_host(model: ModelSpec) -> str:
    """Why the CPU computes no block of ``model``'s LM head, wherever it lies; empty where it may."""
    return "" if model.dealt is None else "the LM head of several ranks is computed by their cards"


def _no_units(hardware: HardwareProfile, model: ModelSpec, lacks: str) -> str:
    """Why the CPU computes none wherever they lie. ``lacks``: why there would be none on any machine with both rates."""
    if hardware.gpu is None:
        return "there is no GPU"
    if hardware.host is None:
        return "the hardware profile has no rates of the CPU beside the GPU (`planner probe` measures them)"
    if no_f16_rates(hardware, model):
        return "the hardware profile has no rates of the CPU with F16 (`planner probe` measures them)"
    return no_hand_over(hardware, model) or lacks


def no_host_attention(hardware: HardwareProfile, model: ModelSpec) -> str:
    """Why the CPU can attend to no layer beside the card; empty where it can."""
    if hardware.gpu is None:
        return "there is no GPU"
    if hardware.host is None or not hardware.host.attention_gbps:
        return "the hardware profile has no rate of attention on the CPU (`planner probe` measures it)"
    if model.dealt is not None:
        return "the CPU attends for one rank alone yet"
    if model.experts is not None:
        return "the CPU's threads are the routed experts'"
    if not model.kv_moves:
        return model.kv_stays_because
    plain = model.compute_dtype is model.kv_dtype is Dtype.bfloat16
    return "" if plain else "the CPU attends to K and V in BF16 alone"


def most_host_rows(hardware: HardwareProfile, model: ModelSpec, batch: int, host: HostUnits) -> int:
    """The most rows for which the CPU's product takes no longer than the unit's copy; ``batch`` at least. ``host`` counts units: of FFNs it
    goes by those, of the LM head's blocks alone by these."""
    assert hardware.host is not None and hardware.gpu is not None
    link, found, rates = hardware.gpu.h2d.peak, batch, hardware.host.computing(model.compute_dtype)
    for form in {unit.format for unit in (model.of_kind(UnitKind.ffn) if host.ffn else (model.lm_head,))}:
        curve = rates.curve(form)
        found = max([found, *(rows for rows, gbps in (curve.points if curve else ()) if gbps >= link)])
    return min(found, rows_timed(hardware, model, host))
