"""The planner against simulated machines: a run is acted out unit by unit on a machine that the profile is wrong about, and told of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from penstock.planner.common.timeline.spans import COMPUTE, EXPERTS, H2D, KV, PASS, SSD, Span
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.lessons.corrections import slowed
from penstock.planner.contract.lessons.fit import Measured, fit
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.stages import Stage, ssd_gbps
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.outcome import Told
from penstock.planner.solver.program import solve
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, MB, machine, model, work
from tests.planner.test_fit import taught

RIGHT = 0.05
SPILLS = work(kv_spill=True, prompt_tokens=4096, batch=16, new_tokens=64)
QUESTIONS = {
    "reads": Question(machine(vram=GB, dram=GB), model(24), work()),
    "copies": Question(machine(vram=GB), model(24), work()),
    "KV": Question(machine(vram=1400 * MB, dram=8 * GB), model(12), SPILLS),
    "computes": Question(machine(), model(24), work()),
    "long prompt": Question(machine(), model(24), work(prompt_tokens=4096, new_tokens=2, batch=4)),
    "on the CPU": Question(machine(vram=0, dram=64 * GB), model(24), work()),
    "on the CPU, reads": Question(machine(vram=0, dram=2 * GB), model(24), work()),
    "routed": Question(machine(vram=2 * GB, dram=2 * GB), model(16, ffn=480 * MB, experts=8), work()),
    "routed, copies": Question(machine(vram=2 * GB), model(16, ffn=480 * MB, experts=8), work()),
}
TRACKS = {Stage.ssd: (SSD,), Stage.h2d: (H2D, KV, EXPERTS), Stage.compute: (COMPUTE,)}
BINDING = [
    ("reads", Figure.ssd),
    ("copies", Figure.h2d),
    ("KV", Figure.h2d),
    ("computes", Figure.weights),
    ("long prompt", Figure.products),
    ("on the CPU", Figure.weights),
    ("on the CPU", Figure.products),
    ("on the CPU, reads", Figure.ssd),
    ("routed", Figure.ssd),
    ("routed, copies", Figure.h2d),
]
"""What each case waits for in a phase, so that a wrong rate of it is a wrong prediction."""


@cache
def planned(name: str) -> Decisions:
    q = QUESTIONS[name]
    return solve(q.hardware, q.model, q.workload)


def acted_out(question: Question, true: HardwareProfile, decisions: Decisions) -> Told:
    predicted = predict(true, question.model, question.workload, decisions)
    plan = Plan(true, question.model, question.workload, decisions, predicted)
    return Told(Simulation(plan, Options(keep_spans=True)).run())


def seen(told: Told) -> Measured:
    """What a run reports: seconds of phases, those in which each stage had work under way, and the rates at which it loaded."""
    spans, steps = told.acted.record.spans, len(told.acted.record.step_ns)
    plan, figures = told.plan, told.figures
    (prefill,) = (span for span in spans if span.track == PASS and span.name == "prefill")

    def busy(phase: tuple[float, float], passes: int) -> dict[Stage, float]:
        sums = {stage: under_way(spans, tracks, *phase) / passes for stage, tracks in TRACKS.items()}
        return {stage: seconds for stage, seconds in sums.items() if seconds}

    ssd, gpu = plan.decisions.weights.ssd, plan.hardware.gpu
    return Measured(
        prefill=busy((prefill.start, prefill.end), 1),
        decode=busy((prefill.end, told.total_s), steps),
        prefill_s=figures["prefill_s"],
        decode_s=figures["decode_s_per_token"],
        ssd_gbps=ssd_gbps(plan.hardware, ssd.block_bytes, ssd.queue_depth),
        h2d_gbps=gpu.h2d.points[-1][1] if gpu else None,
    )


def under_way(spans: Sequence[Span], tracks: Sequence[str], begin_s: float, end_s: float) -> float:
    """Seconds in which any of ``tracks`` had work; waits are none."""
    total, until = 0.0, begin_s
    for span in sorted((s for s in spans if s.track in tracks and not s.waits_for), key=lambda s: s.start):
        first, last = max(span.start, until), min(span.end, end_s)
        total, until = total + max(0.0, last - first), max(until, last)
    return total


def errors(question: Question, hardware: HardwareProfile, told: Told) -> dict[str, float]:
    """How far ``hardware`` predicts a step and the whole run from what they took."""
    steps = len(told.acted.record.step_ns)
    said = predict(hardware, question.model, question.workload, told.plan.decisions)
    whole_s = said.prefill_s + steps * said.decode_s_per_token
    return {"step": abs(said.decode_s_per_token / told.figures["decode_s_per_token"] - 1), "run": abs(whole_s / told.total_s - 1)}


@pytest.mark.parametrize("factor", [0.25, 4.0])
@pytest.mark.parametrize("name, figure", BINDING)
def test_a_wrong_rate_of_what_binds_is_learnt_in_one_run(name: str, figure: Figure, factor: float) -> None:
    q, decisions = QUESTIONS[name], planned(name)
    true = slowed(q.hardware, {figure: factor})
    told = acted_out(q, true, decisions)
    assert max(errors(q, q.hardware, told).values()) > RIGHT, "the profile is wrong about this run"
    fitted = fit(q.hardware, q.model, q.workload, decisions, seen(told))
    known = taught(q.hardware, fitted)
    assert max(errors(q, known, told).values()) < RIGHT
    if q.model.experts is None:  # which experts a step finds is drawn, and is in what a run tells of its links
        assert fitted.slow[figure] == pytest.approx(factor, rel=RIGHT)
        anew = acted_out(q, true, solve(known, q.model, q.workload))
        assert max(errors(q, known, anew).values()) < RIGHT, "also of the plan that is made then"


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_rate_wrong_at_once_is_learnt_too(name: str) -> None:
    q, decisions = QUESTIONS[name], planned(name)
    true = slowed(q.hardware, {Figure.ssd: 4.0, Figure.h2d: 0.25, Figure.d2h: 3.0, Figure.weights: 2.5, Figure.products: 0.3})
    told = acted_out(q, true, decisions)
    known = taught(q.hardware, fit(q.hardware, q.model, q.workload, decisions, seen(told)))
    assert max(errors(q, q.hardware, told).values()) > RIGHT > max(errors(q, known, told).values())
