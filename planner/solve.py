"""`planner solve`: from the configuration to a plan file, told on the way."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from planner.cost import predict
from planner.decisions import Decisions
from planner.errors import UserError
from planner.expert_notes import expert_notes
from planner.force import Force
from planner.hardware import HardwareProfile
from planner.learned import with_calibration
from planner.model import ModelSpec
from planner.plan import Plan
from planner.planfile import write_plan
from planner.program import nearest_first, solve
from planner.render import make_console, print_plan, summary
from planner.resolve import hardware_from, model_from, workload_from
from planner.reuse_notes import reuse_notes
from planner.schema import CalibrationUse, SolveConfig
from planner.simple import gain
from planner.traced_hits import with_hits
from planner.workload import Workload


def make_plan(cfg: SolveConfig) -> Plan:
    """Solve for ``cfg``. Raises UserError for a value that cannot be, and ``planner.explain.Infeasible`` when there is no plan."""
    hardware, workload, model = hardware_from(cfg.hardware), workload_from(cfg.workload), model_from(cfg.model)
    if workload.kv_spill and not hardware.ssd_write_gbps:
        raise UserError("hardware.ssd.write_gbps=0: KV pages that spill are written to the SSD; set its rate, or workload.kv_spill=false")
    if workload.kept_tokens and hardware.gpu is None and not hardware.dram_copy_gbps:
        raise UserError("hardware.dram.copy_gbps=0: KV that is restored is copied in DRAM; set its rate, or workload.kept_tokens=0")
    force = Force.from_config(cfg.force, cfg.moe)
    model, curve = with_hits(model, cfg.moe)
    calibrated: tuple[str, ...] = ()
    if cfg.calibration is CalibrationUse.own:
        hardware, calibrated = with_calibration(hardware, model)
    decisions, doubts = _worth_it(hardware, model, workload, force)
    predicted = predict(hardware, model, workload, decisions)
    plan = Plan(hardware, model, workload, decisions, predicted, (*cfg.notes, *calibrated, *doubts))
    return replace(plan, notes=(*plan.notes, *reuse_notes(plan, force), *expert_notes(plan, curve)))


def _worth_it(hardware: HardwareProfile, model: ModelSpec, workload: Workload, force: Force) -> tuple[Decisions, tuple[str, ...]]:
    """The best decisions, or simple ones where that these are slower is not certain, and a note then."""
    best = solve(hardware, model, workload, force)
    simple = nearest_first(hardware, model, workload, force, best)
    if simple is None:
        return best, ()
    found = gain(hardware, model, workload, best, simple)
    if not found.doubtful:
        return best, ()
    return simple, (
        f"a plan that promises {found.promised:.1%} less time was left for the simple one (each tier filled, nearest first): as far as "
        f"this machine's figures are known it may take {-found.worst:.1%} more",
    )


def solve_plan(cfg: SolveConfig) -> None:
    """Write the plan to ``cfg.out`` and print it; the last line is one JSON document. An older file survives a failure."""
    plan = make_plan(cfg)
    write_plan(plan, Path(cfg.out))
    console = make_console()
    print_plan(plan, console)
    console.print(f"\nwrote {os.path.relpath(cfg.out)}; edit it if you know better, then: runtime run plan={os.path.relpath(cfg.out)}",
                  soft_wrap=True)
    print(json.dumps(summary(plan, cfg.out), separators=(",", ":")))
