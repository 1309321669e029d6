"""One token's visits, which read or do not: the mean over all that they may miss, and what programs and simulations make of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.cli import PROGRAM
from penstock.planner.contract.bills import cost
from penstock.planner.contract.decided.decisions import MissedExperts
from penstock.planner.contract.experts.expert_misses import Misses, misses
from penstock.planner.contract.experts.reading_visits import reading_visits
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.simulate.act import Simulation
from penstock.planner.solver.planning import make_plan, read_question
from penstock.planner.solver.program import optimum

HALF = ("hardware=rtx4090", "model=gpt-oss-120b", "force.expert_dram_slots=2304", "workload.context_tokens=0", "moe.host=copied")
SHORT = (*HALF, "workload.prompt_tokens=128", "workload.new_tokens=48")


def solved(*typed: str) -> Plan:
    return make_plan(PROGRAM.configuration("solve", [*typed]))


@given(st.integers(1, 5), st.floats(0, 1), st.floats(0.001, 1), st.floats(0.1, 9), st.floats(0, 3), st.floats(0, 2))
def test_visits_are_the_mean_over_every_way_to_miss(asked, copied, read, read_s, once_s, hides) -> None:
    copied = min(copied, 1 - read)
    waits = tuple(max(0.0, missed - hides) for missed in range(asked + 1))
    beyond = resting = copying = 0.0
    odds = {"kept": 1 - read - copied, "copied": copied, "read": read}
    for ways in product(odds, repeat=asked):
        chance, j, k = prod(odds[way] for way in ways), ways.count("read"), ways.count("copied")
        beyond += chance * (max(once_s + j * read_s, waits[j + k]) - j * read_s if j else waits[k])
        resting += 0 if j else chance
        copying += 0 if j else chance * waits[k]
    found = reading_visits(waits, copied, read, read_s, once_s)
    assert found.beyond_s == pytest.approx(beyond, abs=1e-9) and found.resting == pytest.approx(resting, abs=1e-9)
    assert found.each_s * asked * read + copying == pytest.approx(beyond, abs=1e-9)
    assert found.reading * asked * read == pytest.approx(1 - resting, abs=1e-9)


def test_where_hardly_any_is_read_each_read_is_a_visit_of_its_own() -> None:
    rare = reading_visits((0.0, 1.0, 2.0), 0.3, 0.0, 5.0, 0.5)
    assert (rare.reading, rare.resting, rare.copying) == pytest.approx((1, 1, 1)) and rare.each_s == pytest.approx(0.5)


def test_a_program_that_is_solved_again_promises_what_its_plan_does() -> None:
    plan = solved(*SHORT)
    found = optimum(read_question(PROGRAM.configuration("solve", SHORT)).question)
    assert found and found.total_s * (1 - 1e-3) <= plan.prediction.total_s <= found.total_s * 1.006


def test_numbers_of_missed_experts_are_alike_or_not() -> None:
    assert Misses(20, 5).is_like(Misses(20.01, 5.001)) and not Misses(20, 5).is_like(Misses(20, 5.1)) and Misses().is_like(Misses())


@pytest.mark.parametrize("typed", [(), ("force.resident_attn=0", "force.resident_head=0")])
def test_a_step_that_misses_as_many_takes_what_is_simulated(typed) -> None:
    """By the experts that the simulation missed, so that nothing is left but seconds: with all that is no expert in VRAM, and streamed."""
    plan = solved(*SHORT, *typed)
    record = Simulation(plan).run().record
    steps, expert_bytes = len(record.step_ns), plan.model.experts.expert_bytes
    missed = (record.counts[f"decode {track} bytes"] / steps / expert_bytes for track in ("h2d.experts", "ssd"))
    promised = step_that_misses(plan, Misses(*missed))
    assert fmean(record.step_ns) / 1e9 == pytest.approx(promised, rel=0.05)


def step_that_misses(plan: Plan, missed: Misses) -> float:
    """Seconds of the law, of a step of ``plan`` that misses so many."""
    phases = cost.Phases.of(plan.hardware, plan.model, plan.workload, plan.decisions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "misses", lambda *asked: missed)
        return cost.step_s(phases.prefill, phases.prefill.step())


def test_what_the_cpu_computes_lies_in_one_tier_alone() -> None:
    plan = solved(*SHORT)
    slots = plan.decisions.experts
    copied, split = (misses(plan.model, replace(slots, host=way), 1, True) for way in (MissedExperts.copied, MissedExperts.split))
    assert split.vram == copied.vram and 0 < split.dram < copied.dram
