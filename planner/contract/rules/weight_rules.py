"""The rule of the LM head's blocks; what each other decision about weights may be is declared with it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.placement import head_block_bytes, head_block_limit, head_blocks
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.rules.rule import BrokenRule


def head_rules(hardware: HardwareProfile, model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    """Where each number of ``d`` is within its range."""
    blocks = d.weights.head_blocks
    if hardware.gpu is None or d.weights.vram.resident_units.head >= blocks:
        return
    if (block := head_block_bytes(model, blocks)) > head_block_limit(model):
        unit = "an attention or FFN unit" if model.experts else "an FFN unit"
        yield BrokenRule(
            "head block <= FFN unit",
            f"weights.head_blocks={blocks} makes LM-head blocks of {show_bytes(block)}; allowed: at most {unit}, "
            f"{show_bytes(head_block_limit(model))}; set head_blocks={head_blocks(model)}",
        )
