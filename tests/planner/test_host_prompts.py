"""Prompts of models with routed experts without a card: the drive rests while the CPU computes what has no experts."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from penstock.planner.cli import PROGRAM
from penstock.planner.contract.bills.prefill import Prefill
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.late_experts import LateExperts
from penstock.planner.contract.prices.price import Late, Price, Resource
from penstock.planner.contract.prices.stages import prefill_compute_s
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.simulated_work import passes_of
from penstock.planner.solver.planning import make_plan
from penstock.planner.solver.program import optimum, solve
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, MB, machine, model, work


def solved(name: str, *typed: str) -> Plan:
    return make_plan(PROGRAM.configuration("solve", ["hardware=cpu", f"model={name}", "workload.new_tokens=24", *typed]))


@pytest.mark.parametrize(
    ("name", "rows", "within"),
    [("llama-4-scout", 1, 0.01), ("glm-4.5-air", 1, 0.01), ("qwen3-30b-a3b", 1, 0.03), ("minimax-m2", 1, 0.04), ("mixtral8x7b", 1, 0.01)]
    + [("llama-4-scout", 8, 0.01)],
)
def test_presets_promise_the_first_token_that_is_simulated(name: str, rows: int, within: float) -> None:
    plan = solved(name, f"workload.batch={rows}", f"workload.requests={rows}")
    assert fmean(Simulation(plan).run().record.prefill_ns) / 1e9 == pytest.approx(plan.prediction.ttft_s, rel=within)


def test_a_layer_waits_for_what_its_slots_do_not_let_come_ahead() -> None:
    hardware, of = machine(vram=0), model(layers=8, experts=24)
    late = LateExperts.of(hardware, of, rows=512, passes=1, launched_s=0.0)
    each_s, read_s, missed = late.expert_s, 0.5, 20
    found = late.brought(8 * missed * read_s, read_s).late
    a_layer_s, beside_s = missed * read_s, 23 * each_s
    ahead_s = (fewest_slots(of.experts) - 1) * read_s
    assert found == {Late.first: pytest.approx(a_layer_s - beside_s), Late.every: pytest.approx(8 * (a_layer_s - beside_s) - 7 * ahead_s)}
    assert Price({Resource.cpu: 3.0}, late=found).lasts() == pytest.approx(3.0 + found[Late.every])


def test_the_program_counts_the_same() -> None:
    hardware, of = machine(vram=0, dram=3 * GB), model(layers=8, ffn=720 * MB, experts=24)
    question = Question(hardware, of, work(prompt_tokens=512), Force(prefill_chunk_tokens=512))
    plan = Prefill(hardware, of, question.workload, solve(hardware, of, question.workload, question.force))
    bill, found = plan.bill(), optimum(question)
    assert bill.lasts() > 1.05 * max(bill.by_resource().values()), "else nothing waits"
    assert found.prefill_s == pytest.approx(plan.seconds(), rel=0.02)


@pytest.mark.parametrize("rows", [64, 512])
def test_one_expert_of_a_prompt_takes_what_the_law_says(rows: int) -> None:
    """A CPU reads its weights and multiplies by them, one after the other, whatever the whole pass takes longer for."""
    plan = solved("minimax-m2", f"workload.prompt_tokens={rows}")
    (prompt,) = [run.each for run in passes_of(plan, tuple(unit for unit, _ in plan.placement.units), 1) if run.each.prefill]
    experts = plan.model.experts
    late = LateExperts.of(plan.hardware, plan.model, rows, 1, launched_s(plan.hardware, plan))
    simulated_s = (prompt.expert_ns + prompt.row_ns * rows * experts.top_k / late.touched) / 1e9
    assert simulated_s == pytest.approx(late.expert_s, rel=0.02)


def launched_s(hardware: HardwareProfile, plan: Plan) -> float:
    slow, fast = (replace(hardware, layer_launch_s=seconds) for seconds in (hardware.layer_launch_s, 0.0))
    return compute_s(slow, plan) - compute_s(fast, plan)


def compute_s(hardware: HardwareProfile, plan: Plan) -> float:
    made = plan.decisions
    return prefill_compute_s(hardware, plan.model, plan.workload, made.batch, made.prefill_chunk_tokens)
