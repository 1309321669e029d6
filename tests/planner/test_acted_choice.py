"""Where the CPU computes beside what streams, the plan that takes least when it is simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock import solve
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.cost import predict
from penstock.planner.explain.explain_table import standing
from penstock.planner.explain.explanation import explain
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.solver import program
from penstock.planner.solver.acted_choice import GAIN, acted_choice
from penstock.planner.solver.terms.problem import Question

GIB = 2**30


def asked(vram_gib: int, force: Force | None = None, **work: int) -> Question:
    """8B beside a CPU that multiplies at 76 GB/s."""
    plan = solve(
        hardware="h100", model="llama8b", **{"workload.prompt_tokens": 128, "workload.new_tokens": 26, "workload.context_tokens": 0}
    )
    return Question(replace(plan.hardware, vram_bytes=vram_gib * GIB), plan.model, replace(plan.workload, **work), force or Force())


def step_s(question: Question, decisions: Decisions) -> float:
    q = question.of_rank(0)
    plan = Plan(q.hardware, q.model, q.workload, decisions, predict(q.hardware, q.model, q.workload, decisions))
    return Simulation(plan, Options()).run().record.step_ns[-1] / 1e9


def found(question: Question) -> Decisions:
    q = question.of_rank(0)
    return program.solve(q.hardware, q.model, q.workload, q.force)


def test_a_plan_nearby_is_taken_where_it_is_faster_when_it_is_simulated() -> None:
    moved = 0
    for vram in range(3, 13):
        own = found(asked(vram))
        acted = acted_choice(asked(vram), own)
        if acted is None:
            continue
        moved += 1
        assert acted.instead_s == pytest.approx(step_s(asked(vram), own), rel=0.01)
        assert (
            acted.step_s == pytest.approx(step_s(asked(vram), acted.decisions), rel=0.01)
            and acted.step_s < (1 - GAIN / 2) * acted.instead_s
        )
        assert acted.decisions.weights.host.ffn != own.weights.host.ffn
    assert moved >= 3


@pytest.mark.parametrize(
    "question",
    [asked(10, Force(host_ffn=8)), asked(10, Force(host_ffn=0)), asked(20), asked(10, clients=4), asked(10, new_tokens=1)],
    ids=["as asked", "none on the CPU", "nothing streams", "a server", "no step"],
)
def test_nothing_is_simulated_where_there_is_no_choice(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.planner.solver.acted_choice.Simulation", lambda *_: pytest.fail("simulated"))
    assert acted_choice(question, found(question)) is None


def test_a_user_reads_why() -> None:
    made = next(
        plan
        for gib in range(3, 13)
        for plan in [solve(hardware="h100", model="llama8b", **{"hardware.vram_bytes": f"{gib}GiB", "workload.prompt_tokens": 128})]
        if any("simulated, a step takes" in note for note in plan.notes)
    )
    (note,) = (note for note in made.notes if "simulated" in note)
    assert note.startswith(f"{made.decisions.weights.host.ffn} FFN units on the CPU, where the program's law has ")
    explained = explain(Question(made.hardware, made.model, made.workload, Force()), None, 0.1)
    assert explained.plan.decisions == made.decisions and standing(explained).endswith(f"It was chosen by simulation: {note}.")
