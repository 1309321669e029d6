"""What runs found that each pass takes beyond its stages is in the figures of every verb, once for each pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.explain.explanation import explain
from penstock.planner.export.otherwise import planned
from penstock.planner.render.stage_names import ROUTERS
from penstock.planner.render.step_lanes import EACH_PASS, lanes
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.outcome import Told
from penstock.planner.solver.program import optimum, search, solve
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, MB, machine, model, work

PASS_S = 0.25
DENSE = Question(machine(vram=1500 * MB, dram=2 * GB), model(24), work(prompt_tokens=2048), Force(prefill_chunk_tokens=512))
ROUTED = Question(machine(vram=2 * GB, dram=4 * GB), model(16, ffn=480 * MB, experts=8), work(), Force(expert_policy=ExpertPolicyName.mix))
ON_CPU = Question(machine(vram=0, dram=2 * GB), model(24), work())
QUESTIONS = {"dense": DENSE, "routed": ROUTED, "on the CPU": ON_CPU}


def with_passes(question: Question) -> Question:
    return question.on(replace(question.hardware, pass_s=PASS_S))


def planned_pair(question: Question) -> tuple[Plan, Plan]:
    """The same decisions without and with the seconds of each pass."""
    decisions = solve(question.hardware, question.model, question.workload, question.force)

    def on(q: Question) -> Plan:
        return Plan(q.hardware, q.model, q.workload, decisions, predict(q.hardware, q.model, q.workload, decisions))

    return on(question), on(with_passes(question))


def passes_of(question: Question) -> int:
    return 4 if question is DENSE else 1


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_plan_predicts_them_once_a_step_and_once_a_pass_of_the_prefill(name: str) -> None:
    without, plan = planned_pair(QUESTIONS[name])
    passes = passes_of(QUESTIONS[name])
    assert plan.prediction.decode_s_per_token - without.prediction.decode_s_per_token == pytest.approx(PASS_S)
    assert plan.prediction.prefill_s - without.prediction.prefill_s == pytest.approx(passes * PASS_S)
    assert plan.passes_s == pytest.approx({"prefill": passes * PASS_S, "decode": PASS_S})


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_fastest_plans_seconds_are_those_that_are_minimised(name: str) -> None:
    question = with_passes(QUESTIONS[name])
    best, work = optimum(question), question.workload
    assert best is not None
    assert best.prefill_s + work.new_tokens * best.decode_s == pytest.approx(best.total_s, rel=1e-6)
    found = search(question.hardware, question.model, work, question.force)
    said = predict(question.hardware, question.model, work, found.decisions)
    assert said.total_s == pytest.approx(best.total_s, rel=0.0051)


@pytest.mark.parametrize("objective", [Objective.ttft, Objective.latency])
def test_a_prefill_takes_fewer_passes_where_each_costs_more(objective: Objective) -> None:
    wanted = work(prompt_tokens=2048, objective=objective)
    question = Question(replace(machine(vram=3 * GB, dram=4 * GB), layer_launch_s=5e-5), model(24), wanted)
    chunks = [solve(q.hardware, q.model, q.workload).prefill_chunk_tokens for q in (question, with_passes(question))]
    assert chunks[0] < chunks[1] == wanted.prompt_tokens


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_explanation_names_them_and_takes_none_of_them_for_experts(name: str) -> None:
    found = explain(with_passes(QUESTIONS[name]), None, 0.1)
    rows = {row.name: row for row in found.constraints}
    assert rows["decode: each pass"].used == pytest.approx(PASS_S)
    assert rows["prefill: each pass"].used == pytest.approx(found.plan.passes_s["prefill"])
    assert ("decode: routers" in rows) == (name == "routed") and "prefill: routers" not in rows
    if name == "dense":
        without = explain(QUESTIONS[name], None, 0.1)
        assert not any("each pass" in row.name for row in without.constraints)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_steps_picture_ends_with_them(name: str) -> None:
    without, plan = planned_pair(QUESTIONS[name])
    *others, last = lanes(plan)
    assert last.stage == EACH_PASS and last.busy_s == pytest.approx(PASS_S)
    assert last.parts[-1].end_s == plan.prediction.decode_s_per_token
    assert [lane.stage for lane in others] == [lane.stage for lane in lanes(without)]
    assert (others[-1].stage == ROUTERS) == (name == "routed")
    assert others[-1].busy_s == pytest.approx(lanes(without)[-1].busy_s)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_simulated_run_takes_them_and_moves_nothing_else_in_them(name: str, skip: bool) -> None:
    without, plan = (Simulation(plan, Options(skip=skip)).run() for plan in planned_pair(QUESTIONS[name]))
    was, now = Told(without), Told(plan)
    assert now.figures["decode_s_per_token"] - was.figures["decode_s_per_token"] == pytest.approx(PASS_S)
    assert now.figures["prefill_s"] - was.figures["prefill_s"] == pytest.approx(passes_of(QUESTIONS[name]) * PASS_S)
    steps = len(without.record.step_ns) + passes_of(QUESTIONS[name])
    assert now.total_s - was.total_s == pytest.approx(steps * PASS_S)
    assert now.waits() == was.waits() and plan.cache == without.cache


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_exports_steps_are_those_of_the_plan(name: str) -> None:
    for plan in planned_pair(QUESTIONS[name]):
        assert planned(plan).seconds == pytest.approx(plan.prediction.decode_s_per_token)
