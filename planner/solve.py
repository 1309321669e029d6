"""`planner solve`: from the configuration to a plan file, told on the way."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from planner.cost import predict
from planner.decisions import ExpertPolicyName
from planner.errors import UserError
from planner.force import Force
from planner.foresight import expert_notes
from planner.hits import concave, flaw
from planner.model import ModelSpec
from planner.plan import Plan
from planner.planfile import write_plan
from planner.program import solve
from planner.render import make_console, print_plan, summary
from planner.resolve import hardware_from, model_from, workload_from
from planner.reuse_notes import reuse_notes
from planner.schema import SolveConfig


def make_plan(cfg: SolveConfig) -> Plan:
    """Solve for ``cfg``. Raises UserError for a value that cannot be, and ``planner.explain.Infeasible`` when there is no plan."""
    hardware, workload, model = hardware_from(cfg.hardware), workload_from(cfg.workload), model_from(cfg.model)
    if workload.kv_spill and not hardware.ssd_write_gbps:
        raise UserError("hardware.ssd.write_gbps=0: KV pages that spill are written to the SSD; set its rate, or workload.kv_spill=false")
    if workload.kept_tokens and hardware.gpu is None and not hardware.dram_copy_gbps:
        raise UserError("hardware.dram.copy_gbps=0: KV that is restored is copied in DRAM; set its rate, or workload.kept_tokens=0")
    force = Force.from_config(cfg.force, cfg.moe)
    curve = None
    if cfg.moe.traces is not None:
        model, curve = with_traced_hits(model, Path(cfg.moe.traces), cfg.moe.policy or ExpertPolicyName.mix)
    decisions = solve(hardware, model, workload, force)
    predicted = predict(hardware, model, workload, decisions)
    plan = Plan(hardware, model, workload, decisions, predicted, tuple(cfg.notes))
    return replace(plan, notes=(*plan.notes, *reuse_notes(plan, force), *expert_notes(plan, curve)))


def with_traced_hits(model: ModelSpec, path: Path, policy: ExpertPolicyName) -> tuple[ModelSpec, str]:
    """``model`` with the hits of ``policy`` on the trace at ``path``, and where they come from, in words. Raises UserError for a trace of
    another model."""
    from planner.replay import hit_curve
    from planner.traces import read_trace

    if model.experts is None:
        raise UserError(f"moe.traces={path}: {model.name} has no routed experts; drop it, or choose a MoE model")
    trace = read_trace(path)
    rates = concave(hit_curve(trace, policy))
    if wrong := flaw(rates, model.experts.count):
        count = model.experts.count
        raise UserError(f"moe.traces={path}: the curve of hits has {wrong}; give a trace of a model with {count} experts a layer")
    return replace(model, experts=replace(model.experts, hit_rates=rates)), f"{policy} on {path}"


def solve_plan(cfg: SolveConfig) -> None:
    """Write the plan to ``cfg.out`` and print it; the last line is one JSON document. An older file survives a failure."""
    plan = make_plan(cfg)
    write_plan(plan, Path(cfg.out))
    console = make_console()
    print_plan(plan, console)
    console.print(f"\nwrote {os.path.relpath(cfg.out)}; edit it if you know better, then: runtime run plan={os.path.relpath(cfg.out)}",
                  soft_wrap=True)
    print(json.dumps(summary(plan, cfg.out), separators=(",", ":")))
