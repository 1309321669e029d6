"""Plans that break rules: which of them can be acted out all the same."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.rules.rule import BrokenRule

BENDS = (
    "hwm = cap + k, 3 <= k <= 10",
    "cap <= prefetch_distance <= hwm",
    "cap <= layers through DRAM",
    "vram_slots >= vram_prefetch_distance + 2",
    "VRAM capacity",
    "DRAM capacity",
    "SSD capacity",
)
"""Rules without which a plan is slow, or too large for its machine, and still means something."""


def may_bend(broken: Sequence[BrokenRule]) -> bool:
    """Whether ``rules=warn`` passes over all of ``broken``."""
    return all(rule.name in BENDS for rule in broken)


def check_bent(plan: Plan, broken: Sequence[BrokenRule]) -> None:
    """UserError where ``plan``, which breaks the rules ``broken``, means nothing that could be acted out."""
    for rule in broken:
        if rule.name not in BENDS:
            raise UserError(f"the plan breaks a rule that rules=warn cannot pass over ({rule.name}): {rule.message}")
    placement, dram = plan.placement, plan.decisions.weights.dram
    if placement.ssd_layers and placement.dram_slots <= len(placement.resident_layers):
        kept = len(placement.resident_layers)
        raise UserError(
            f"weights.dram.hwm_layers={dram.hwm_layers}: nothing can pass through a cache that keeps {kept} layers; allowed: {kept + 1} or "
            "more, set it so"
        )
    for name, (slots, _) in placement.ring_classes.items() if placement.streamed_units else ():
        if slots < 1:
            raise UserError(f"weights.vram.slots={plan.decisions.weights.vram.slots}: leaves none for {name} units; allowed: 2 or more")
