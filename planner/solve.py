"""`planner solve`: from the configuration to a plan file, told on the way."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from planner.cost import predict
from planner.errors import UserError
from planner.expert_notes import expert_notes
from planner.force import Force
from planner.plan import Plan
from planner.planfile import write_plan
from planner.problem import Question
from planner.program import solve
from planner.render import make_console, print_plan, summary
from planner.resolve import hardware_from, model_from, workload_from
from planner.reuse_notes import reuse_notes
from planner.schema import SolveConfig
from planner.traced_hits import with_hits


def make_plan(cfg: SolveConfig) -> Plan:
    """Solve for ``cfg``. Raises UserError for a value that cannot be, and ``planner.infeasible.Infeasible`` when there is no plan."""
    question, curve = question_from(cfg)
    plan = answer(question, tuple(cfg.notes))
    return replace(plan, notes=(*plan.notes, *reuse_notes(plan, question.force), *expert_notes(plan, curve)))


def answer(question: Question, notes: tuple[str, ...] = ()) -> Plan:
    """The best plan. Raises UserError, and ``planner.infeasible.Infeasible`` when there is none."""
    q = question
    decisions = solve(q.hardware, q.model, q.workload, q.force)
    return Plan(q.hardware, q.model, q.workload, decisions, predict(q.hardware, q.model, q.workload, decisions), notes)


def question_from(cfg: SolveConfig) -> tuple[Question, str | None]:
    """What ``cfg`` asks, and where the hits of a trace come from, in words. Raises UserError for a value that cannot be."""
    hardware, workload, model = hardware_from(cfg.hardware), workload_from(cfg.workload), model_from(cfg.model)
    if workload.kv_spill and not hardware.ssd_write_gbps:
        raise UserError("hardware.ssd.write_gbps=0: KV pages that spill are written to the SSD; set its rate, or workload.kv_spill=false")
    if workload.kept_tokens and hardware.gpu is None and not hardware.dram_copy_gbps:
        raise UserError("hardware.dram.copy_gbps=0: KV that is restored is copied in DRAM; set its rate, or workload.kept_tokens=0")
    force = Force.from_config(cfg.force, cfg.moe)
    model, curve = with_hits(model, cfg.moe)
    return Question(hardware, model, workload, force), curve


def solve_plan(cfg: SolveConfig) -> None:
    """Write the plan to ``cfg.out`` and print it; the last line is one JSON document. An older file survives a failure."""
    plan = make_plan(cfg)
    write_plan(plan, Path(cfg.out))
    console = make_console()
    print_plan(plan, console)
    console.print(f"\nwrote {os.path.relpath(cfg.out)}; edit it if you know better, then: runtime run plan={os.path.relpath(cfg.out)}",
                  soft_wrap=True)
    print(json.dumps(summary(plan, cfg.out), separators=(",", ":")))
