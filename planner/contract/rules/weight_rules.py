"""Rules of the LM head's blocks and of a server's prompts; what each other decision about weights may be is declared with it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.placement import head_block_bytes, head_block_limit, head_blocks
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.rules.rule import BrokenRule
from penstock.planner.contract.rules.setting import RECORDED


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


def prompt_rules(workload: Workload, d: Decisions) -> Iterator[BrokenRule]:
    """A server's passes have rows beside prompts, so many as there are, and are launched."""
    if workload.is_served and d.recorded_prompt_tokens:
        given = f"recorded_prompt_tokens={d.recorded_prompt_tokens}"
        yield BrokenRule(RECORDED, f"{given}; allowed: 0, since a server's passes are launched; set recorded_prompt_tokens=0")
