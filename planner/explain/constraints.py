"""What holds a plan back: the stage that each phase waits for, the capacities that are full, the rules at their limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.rank_predictions import predict_ranks
from penstock.planner.contract.plan.tier_fill import fills
from penstock.planner.contract.prices.launches import is_recorded, issue_s, keeps_link_busier, pieces_issue_s
from penstock.planner.contract.prices.price import computing_of
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.explain.margins import Margin
from penstock.planner.render.stage_names import decode_waits, prefill_waits, stage_names
from penstock.planner.solver.terms.menu import MENUS

NEARLY = 0.98
"""A stage that is busy for this share of its phase would hold it up next."""


class Grip(StrEnum):
    """How a constraint holds."""

    binds = "binds"
    """More of it is faster."""
    needed = "needed"
    """More of it gains nothing, less of it costs."""
    slack = "slack"


@dataclass(frozen=True)
class Constraint:
    """``used`` of ``limit`` in ``unit``; ``note`` is a phrase for people."""

    name: str
    grip: Grip
    used: float
    limit: float
    unit: str
    note: str

    @property
    def share(self) -> float:
        return self.used / self.limit if self.limit else 0.0


def constraints(plan: Plan, margins: Sequence[Margin]) -> tuple[Constraint, ...]:
    """Stages of both phases, capacities, rules. Whether a capacity binds is asked of its margin, not of how full it is."""
    return (*_stages(plan), *_capacities(plan, {m.resource.key: m for m in margins}), *_rules(plan))


def _stages(plan: Plan) -> Iterator[Constraint]:
    p = plan.prediction
    phases = (
        ("decode", p.decode_stages, p.decode_s_per_token, 0.0, decode_waits(plan)),
        ("prefill", p.prefill_stages, p.prefill_s, p.restore_s, prefill_waits(plan)),
    )
    for phase, stages, phase_s, first_s, waits in phases:
        slowest_s = max(stages.values())
        for stage, name in stage_names(plan).items():
            busy_s = stages[stage]
            if not busy_s:
                continue
            grip = Grip.binds if busy_s == slowest_s else Grip.needed if busy_s >= NEARLY * slowest_s else Grip.slack
            note = {Grip.binds: "the slowest", Grip.needed: "the slowest next", Grip.slack: "hidden behind others"}[grip]
            if (phase, stage) == ("decode", computing_of(plan.hardware)) and launches_bind(plan):
                note += ", launching kernels"
            elif (phase, stage) == ("decode", computing_of(plan.hardware)) and (pieces_s := launched_pieces_s(plan)):
                note += f", {show_seconds(pieces_s)} of it launching behind routers"
            yield Constraint(f"{phase}: {name}", grip, busy_s, phase_s, "s", f"{show_seconds(busy_s)}, {note}")
        for wait in waits:
            yield Constraint(f"{phase}: {wait.name}", Grip.binds, wait.seconds, phase_s, "s", f"{show_seconds(wait.seconds)} {wait.why}")
        if fixed_s := plan.passes_s[phase]:
            note = f"{show_seconds(fixed_s)} in which no stage works, as runs found"
            yield Constraint(f"{phase}: each pass", Grip.binds, fixed_s, phase_s, "s", note)
        if first_s:
            yield Constraint(f"{phase}: restored KV", Grip.binds, first_s, phase_s, "s", f"{show_seconds(first_s)} before the rest")


def launches_bind(plan: Plan) -> bool:
    """Whether a decode step computes no faster than the host launches its kernels, and takes longer for it."""
    machine, placement = plan.hardware, plan.placement
    if machine.gpu is None or is_recorded(machine, placement, plan.decisions.kv) or keeps_link_busier(machine, placement):
        return False
    launched_s = issue_s(plan.hardware, plan.model, plan.decisions.batch)
    return launched_s >= NEARLY * plan.prediction.decode_stages[computing_of(plan.hardware)]


def launched_pieces_s(plan: Plan) -> float:
    """Seconds of a decode step's computing in which the card waits for the host, which launches a piece behind each router; 0 where the
    step is one launch, or launched kernel by kernel."""
    if plan.hardware.gpu is None or not is_recorded(plan.hardware, plan.placement, plan.decisions.kv):
        return 0.0
    return pieces_issue_s(plan.hardware, plan.model, plan.decisions.batch)


def prompt_waits_s(plan: Plan) -> float:
    """Seconds of a prefill that would not be, if launching took the host nothing; 0 without a card, and where it is next to nothing."""
    if plan.hardware.gpu is None:
        return 0.0
    machine, whole_s = replace(plan.hardware, layer_launch_s=0.0), plan.prediction.prefill_s
    at_once = predict_ranks(machine, plan.model, plan.workload, plan.ranks.decided(plan.decisions), plan.dealing)
    return whole_s - at_once.prefill_s if at_once.prefill_s < NEARLY * whole_s else 0.0


def _capacities(plan: Plan, margins: dict[str, Margin]) -> Iterator[Constraint]:
    for fill in fills(plan):
        margin = margins.get(fill.tier)
        if margin is None or fill.tier is Tier.ssd:
            grip, note = Grip.needed if fill.free_bytes < 0.01 * fill.capacity_bytes else Grip.slack, "room for what lies there"
        else:
            grip = Grip.binds if margin.binds else Grip.needed if margin.needed else Grip.slack
            note = {Grip.binds: "more is faster", Grip.needed: "a step less is slower", Grip.slack: "enough"}[grip]
        used = f"{show_bytes(fill.taken_bytes)} of {show_bytes(fill.capacity_bytes)}, {note}"
        yield Constraint(f"{fill.tier.upper()} capacity", grip, fill.taken_bytes, fill.capacity_bytes, "bytes", used)


def _rules(plan: Plan) -> Iterator[Constraint]:
    """Rules that hold memory which residents could have."""
    cache, placement = plan.decisions.weights.dram, plan.placement
    if placement.ssd_layers:
        spare, least = cache.hwm_layers - cache.cap_layers, LIMITS.headroom_min
        grip = Grip.needed if spare == least else Grip.slack
        yield Constraint("rule: DRAM headroom", grip, least, spare, "layers", f"{spare} slots that keep nothing, {least} at the least")
    if placement.streamed_units:
        slots, least = plan.decisions.weights.vram.slots, MENUS.ring_slots[0]
        grip = Grip.needed if slots <= least else Grip.slack
        note = f"{slots} slots take {show_bytes(placement.ring_bytes)} of VRAM, {least} at the least"
        yield Constraint("rule: VRAM ring", grip, least, slots, "slots", note)
