"""The CPU beside the card: whether it may compute units of a step, and at which rates."""

from __future__ import annotations

from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.decided.recording import can_record, launched_because
from penstock.planner.contract.given.formats import Dtype
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind


def host_rows_timed(hardware: HardwareProfile, model: ModelSpec) -> int:
    """The most rows for which the CPU's products with ``model``'s FFN units were timed; 0 where it cannot compute them."""
    if hardware.host is None or hardware.gpu is None or not model.ffn_activation or model.compute_dtype is not Dtype.bfloat16:
        return 0
    return min(hardware.host.most_rows(unit.format) for unit in model.of_kind(UnitKind.ffn))


def no_host_units(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> str:
    """Why the CPU can compute no unit of a decode step by ``decisions``; empty where it can."""
    if hardware.gpu is None:
        return "there is no GPU"
    if hardware.host is None:
        return "the CPU's products beside the GPU were not measured"
    if not host_rows_timed(hardware, model):
        return "the CPU has no product with these FFNs"
    if not can_record(hardware, model):
        return "steps of this model cannot be recorded"
    return launched_because(place(model, decisions.weights, True), decisions.kv.pages - decisions.kv.vram_pages) or ""
