"""All rules, and what a plan takes of each tier against what there is."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.common.measures import GB, show_bytes
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.memory_law import dram_items, held_by, ssd_need, vram_items
from penstock.planner.contract.rules.expert_rules import expert_rules
from penstock.planner.contract.rules.kv_rules import kv_rules
from penstock.planner.contract.rules.rule import BrokenRule
from penstock.planner.contract.rules.setting import Setting
from penstock.planner.contract.rules.weight_rules import head_rules, prompt_rules


def broken_rules(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> list[BrokenRule]:
    """The rules that ``decisions`` break, in a fixed order: every range; where all hold, what counts by these numbers; where that holds,
    capacities."""
    if ranges := [*Setting(hardware, model, decisions).broken(), *expert_rules(model, decisions)]:
        return ranges
    counts = [*head_rules(hardware, model, decisions), *prompt_rules(workload, decisions), *kv_rules(hardware, model, workload, decisions)]
    return counts or list(_capacities(hardware, model, workload, decisions))


def _capacities(hardware: HardwareProfile, model: ModelSpec, workload: Workload, d: Decisions) -> Iterator[BrokenRule]:
    held = held_by(hardware, model, workload, d)
    tiers = (
        ("VRAM", "vram_bytes", hardware.vram_bytes if hardware.gpu else 0, vram_items(hardware, model, workload, held)),
        ("DRAM", "dram_bytes", hardware.dram_bytes, dram_items(hardware, model, workload, held)),
        ("SSD", "ssd_bytes", hardware.ssd_bytes, ssd_need(hardware, model, workload, d)),
    )
    for tier, key, capacity, use in tiers:
        need = sum(use.values())
        if need > capacity:
            items = ", ".join(f"{item} {show_bytes(n)}" for item, n in sorted(use.items(), key=lambda i: -i[1]) if n)
            yield BrokenRule(
                f"{tier} capacity",
                f"{tier}: the plan needs {need / GB:.3f} GB ({items}); allowed: hardware.{key}={capacity / GB:.3f} GB; "
                f"keep less there or solve again",
            )
