"""`planner simulate`: a plan acted out, as tables, JSON and a timeline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import resources

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from penstock.planner.asked.verb_schema import RuleBreaks, SimulateConfig
from penstock.planner.common.bars import make_bar
from penstock.planner.common.console import make_console
from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import raise_if_interrupted
from penstock.planner.common.output import check_apart, writable, write_json
from penstock.planner.common.timeline.timeline_file import check_form, write_trace
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.experts.policies import make_expert_policy
from penstock.planner.contract.experts.routing_files import read_routings
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.plan_ranks import check_alone
from penstock.planner.contract.plan.planfile import broken_in, read_plan
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options, Progress
from penstock.planner.simulate.bend import check_bent, may_bend
from penstock.planner.simulate.outcome import Told
from penstock.planner.simulate.ranks.dealt_told import DealtTold
from penstock.planner.simulate.ranks.ranks_act import RanksSimulation
from penstock.planner.simulate.routers import RecordedRouters, Routers, drawn_routers
from penstock.planner.simulate.simulate_table import print_told
from penstock.planner.verbs.play_serving import is_played, play_serving
from penstock.planner.verbs.simulation_length import Hint, check_length


def simulate_verb(cfg: SimulateConfig) -> None:
    """Act the plan out and tell; with decisions changed, the plan as it was beside it. The last line is one JSON document. Files are
    written when all is done."""
    check_apart({"plan": cfg.plan, "routings": cfg.routings, "trace": cfg.trace, "out": cfg.out})
    if cfg.trace is not None:
        check_form(writable(user_path(cfg.trace), "trace"))
    if cfg.out is not None:
        writable(user_path(cfg.out), "out")
    plan, force = _asked(cfg)
    _check_dealt(cfg, plan, force)
    changed = _forced(plan, force, cfg.rules)
    if is_played(cfg.serve, plan):
        play_serving(cfg, changed)
        return
    routers = _routers(cfg, plan)
    options = Options(cfg.wrap_around, keep_spans=cfg.trace is not None)
    for one in (changed, plan):
        check_length(one)
    with make_bar(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as bar:
        task, hint = bar.add_task("simulating", total=None), Hint(lambda line: print(line, file=sys.stderr, flush=True))

        def progress(done: int, of: int) -> None:
            raise_if_interrupted()
            bar.update(task, completed=done, total=of)
            hint(done, of)

        told = _told(changed, options, progress, routers())
        before = _told(plan, Options(cfg.wrap_around), progress, routers()) if changed is not plan and not _broken(plan) else None
    console = make_console()
    if cfg.demo is not None:
        console.print(f"{cfg.demo.about}\n", soft_wrap=True)
    for rule in broken_in(changed):
        console.print(f"warning: the plan breaks a rule ({rule.name}): {rule.message}", style="yellow", soft_wrap=True)
    print_told(told, before, console)
    document = {"plan": _name(cfg), **told.document()}
    if before is not None:
        document["before"] = before.document()
        document["damage"] = {"ssd_bytes": told.read_bytes - before.read_bytes, "seconds": float(f"{told.total_s - before.total_s:.6g}")}
    if cfg.out is not None:
        write_json(user_path(cfg.out), "out", document)
    if cfg.trace is not None:
        write_trace(told.timeline(), user_path(cfg.trace))
    cfg.close(document)


def _asked(cfg: SimulateConfig) -> tuple[Plan, Force]:
    force = Force.from_config(cfg.force)
    if cfg.plan is not None and cfg.demo is None:
        return read_plan(user_path(cfg.plan)), force
    if cfg.plan is not None or cfg.demo is None:
        raise UserError("plan=, demo=: one of them is needed, and only one; write a plan with `planner solve`, or choose a demonstration")
    own = {name: getattr(cfg.demo, name) for name in ("cap_layers", "hwm_layers", "prefetch_distance")}
    force = force.but(**{name: value for name, value in own.items() if name not in force.given})
    with resources.as_file(resources.files("penstock").joinpath("conf", "plans", f"{cfg.demo.plan}.yaml")) as path:
        return read_plan(path), force


def _forced(plan: Plan, force: Force, rules: RuleBreaks) -> Plan:
    """``plan`` with what is forced; itself where nothing changes. UserError where a rule is broken that is not to be."""
    decisions = force.apply(plan.decisions, plan.model.layers) if force.given else plan.decisions
    changed = plan if decisions == plan.decisions else replace(plan, decisions=decisions)
    broken = broken_in(changed)
    if broken and rules is RuleBreaks.refuse:
        besides = "; or simulate it all the same with rules=warn" if may_bend(broken) else ""
        raise UserError(f"the plan breaks a rule ({broken[0].name}): {broken[0].message}{besides}")
    if broken:
        check_bent(changed, broken)
        return changed
    return changed if changed is plan else replace(changed, prediction=predict(plan.hardware, plan.model, plan.workload, decisions))


def _check_dealt(cfg: SimulateConfig, plan: Plan, force: Force) -> None:
    """UserError where ``plan`` is of several ranks, and something is asked that is of one alone."""
    if plan.ranks.count == 1:
        return
    asked = {"force": force.given, "routings": cfg.routings}
    for name, given in asked.items():
        if given:
            check_alone(plan.ranks, cfg.plan or "", f"`planner simulate` with {name}")


def _broken(plan: Plan) -> tuple[str, ...]:
    return tuple(rule.name for rule in broken_in(plan))


def _told(plan: Plan, options: Options, progress: Progress, routers: Routers | None) -> Told:
    if plan.ranks.count == 1:
        return Told(Simulation(plan, options, progress, routers).run(), _broken(plan))
    first, *others = RanksSimulation(plan, options, progress).run()
    return DealtTold(first, _broken(plan), plan, tuple(Told(one) for one in others))


def _routers(cfg: SimulateConfig, plan: Plan) -> Callable[[], Routers | None]:
    """Makes the routers' choices, the same ones each time; None for a dense model. UserError for routings of another model."""
    experts, made = plan.model.experts, plan.decisions.experts
    if experts is None or made is None:
        if cfg.routings is not None:
            raise UserError(
                f"routings={cfg.routings}: {plan.model.name} has no routed experts; leave it out, or name a plan of a MoE model"
            )
        return lambda: None
    needs = make_expert_policy(made.policy, len(experts.layers), experts.count, experts.top_k).needs_ahead
    if cfg.routings is None:
        if needs is not None:
            raise UserError(
                f"experts.policy={made.policy}: needs scores of hidden states, which only recorded routings have; give routings=FILE"
            )
        return lambda: drawn_routers(plan)
    recorded = read_routings(user_path(cfg.routings), experts.count)
    for what, found, planned in (("MoE layers", recorded.layers, len(experts.layers)), ("experts a token", recorded.top_k, experts.top_k)):
        if found != planned:
            raise UserError(f"routings={cfg.routings}: has {found} {what}, the plan's model {planned}; name routings of {plan.model.name}")
    if needs is not None and needs not in recorded.scores and recorded.layers > 1:
        raise UserError(
            f"routings={cfg.routings}: has no scores for experts.policy={made.policy}; record them with `runtime run moe.record=`"
        )
    return lambda: RecordedRouters(recorded, needs if recorded.layers > 1 else None)


def _name(cfg: SimulateConfig) -> str | None:
    return cfg.plan if cfg.demo is None else cfg.demo.plan
