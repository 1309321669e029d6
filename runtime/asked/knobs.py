"""How the engine is to move, held against the plan that it executes: what cannot work is refused before anything is loaded."""

from __future__ import annotations

from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.policy import make_policy
from penstock.planner.contract.policy.turns import Turns
from penstock.runtime.asked.run_schema import EngineConfig


def check_engine(engine: EngineConfig, plan: Plan) -> list[str]:
    """Notes on what has no effect with ``plan``. UserError for what cannot work."""
    check_least(engine)
    placement = plan.placement
    vram = plan.decisions.weights.vram
    fill = len(make_policy(placement, engine.wrap_around).preload())
    if engine.warmup_layers is not None:
        why = f"the DRAM cache's first fill is {fill} layers"
        _at_most("warmup_layers", engine.warmup_layers, 0, fill, why, "leave it out to wait for all of them")
    if not placement.streamed_units:
        idle = {"balance_units": engine.balance_units != 1, "keep_finished_units": engine.keep_finished_units != 0}
        return [f"engine.{name} has no effect: no unit streams through VRAM in this plan" for name, given in idle.items() if given]
    slots = {name: count for name, (count, _) in placement.ring_classes.items()}
    turns = Turns([u.ring_class for u in placement.streamed_units], slots, vram.prefetch_distance)
    why = f"the plan copies {vram.prefetch_distance} units ahead"
    _at_most("balance_units", engine.balance_units, 1, max(1, vram.prefetch_distance), why, "raise force.vram_prefetch_distance")
    why = f"with {vram.slots} slots a slot is wanted again after {turns.shortest_round} units"
    _at_most("keep_finished_units", engine.keep_finished_units, 0, turns.shortest_round - 1, why, "raise force.vram_slots")
    return []


def check_least(engine: EngineConfig) -> None:
    """UserError for a number that is too small whatever the plan."""
    for name, least in (("warmup_layers", 0), ("balance_units", 1), ("keep_finished_units", 0)):
        value = getattr(engine, name)
        if value is not None and value < least:
            raise UserError(f"engine.{name}={value}: must be {least} or more; leave it out")


def _at_most(name: str, value: int | None, least: int, most: int, why: str, remedy: str) -> None:
    if value is not None and value > most:
        raise UserError(f"engine.{name}={value}: {why}, so {least} to {most} are allowed; lower it, or {remedy}")
