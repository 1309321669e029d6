"""Where the CPU computes beside what streams, the plan that takes least when it is simulated."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest

from penstock import solve
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.explain.explain_table import standing
from penstock.planner.explain.explanation import explain, question_of
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.ranks.ranks_act import RanksSimulation
from penstock.planner.solver import program
from penstock.planner.solver.acted_choice import GAIN, acted_choice
from penstock.planner.solver.planning import answer
from penstock.planner.solver.terms.problem import Question

GIB = 2**30


@cache
def whole() -> Plan:
    """8B beside a CPU that multiplies at 76 GB/s."""
    return solve(
        hardware="h100", model="llama8b", **{"workload.prompt_tokens": 128, "workload.new_tokens": 26, "workload.context_tokens": 0}
    )


def asked(vram_gib: int, force: Force | None = None, **work: int) -> Question:
    plan = whole()
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
    for vram in (5, 8, 10, 12):
        question = asked(vram)
        own = found(question)
        acted = acted_choice(question, own)
        if acted is None:
            continue
        moved += 1
        assert acted.instead_s == pytest.approx(step_s(question, own), rel=0.01)
        assert acted.step_s == pytest.approx(step_s(question, acted.plan.decisions), rel=0.01)
        assert acted.step_s < (1 - GAIN / 2) * acted.instead_s
        assert acted.plan.decisions.weights.host.ffn != own.weights.host.ffn
    assert moved >= 2


@pytest.mark.parametrize(
    "vram, force, work",
    [(10, {"host_ffn": 8}, {}), (10, {"host_ffn": 0}, {}), (20, {}, {}), (10, {}, {"clients": 4}), (10, {}, {"new_tokens": 1})],
    ids=["as asked", "none on the CPU", "nothing streams", "a server", "no step"],
)
def test_nothing_is_simulated_where_there_is_no_choice(
    vram: int, force: dict[str, int], work: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Simulation", "RanksSimulation"):
        monkeypatch.setattr(f"penstock.planner.solver.acted_choice.{name}", lambda *_: pytest.fail("simulated"))
    question = asked(vram, Force(**force), **work)
    assert acted_choice(question, found(question)) is None


def test_one_weak_core_is_left_alone_where_all_that_waits_for_it_takes_longer() -> None:
    question = asked(6)
    host = question.hardware.host
    assert host is not None
    weak = {
        name: Curve(tuple((rows, gbps * 11 / host.products["BF16"].at(1)) for rows, gbps in curve.points))
        for name, curve in host.products.items()
    }
    core = replace(host, threads=1, products=weak, beside_h2d=0.95, h2d_beside=0.97, ahead_bytes=0)
    question = replace(question, hardware=replace(question.hardware, host=core))
    own = found(question)
    assert own.weights.host.ffn > 3, "the program's law lets it compute"
    acted = acted_choice(question, own)
    assert acted is not None and acted.plan.decisions == found(replace(question, force=Force(host_ffn=0)))
    assert step_s(question, acted.plan.decisions) < step_s(question, found(replace(question, force=Force(host_ffn=1))))


def test_a_user_reads_why() -> None:
    question = asked(12)
    made = answer(question)
    (note,) = (note for note in made.notes if "simulated" in note)
    assert note.startswith(f"{made.decisions.weights.host.ffn} FFN units on the CPU, where the program's law has ")
    explained = explain(question, None, 0.1)
    assert explained.plan.decisions == made.decisions and standing(explained).endswith(f"It was chosen by simulation: {note}.")


def two_cards(*overrides: str) -> Plan:
    """70B by two cards beside one CPU."""
    work = {"workload.prompt_tokens": 128, "workload.new_tokens": 6, "workload.context_tokens": 0, "hardware.links.word_hop_s": 1.5e-5}
    return solve(hardware="h100x2", model="llama70b", vram="16GiB", overrides=["ranks=2", *overrides], **work)


def test_all_ranks_are_simulated_together() -> None:
    def step_s(plan: Plan) -> float:
        return RanksSimulation(plan, Options()).run()[0].record.step_ns[-1] / 1e9

    made = two_cards()
    (note,) = (note for note in made.notes if "simulated" in note)
    units, own = (int(word) for word in re.findall(r"^(\d+) FFN units of each rank on the CPU, .* has (\d+):", note)[0])
    assert {one.weights.host.ffn for one in made.ranks.decided(made.decisions)} == {units}
    forced = two_cards(f"force.host_ffn={own}")
    assert not any("simulated" in one for one in forced.notes)
    assert step_s(made) < (1 - GAIN) * step_s(forced) and made.prediction.decode_s_per_token > forced.prediction.decode_s_per_token
    explained = explain(question_of(made), made, 0.1)
    assert explained.own.decisions == made.decisions and standing(explained).endswith(f"It was chosen by simulation: {note}.")
    without = two_cards("force.host_ffn=0")
    assert not any("simulated" in one for one in without.notes)
