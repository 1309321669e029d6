"""Steps that read layers from the SSD and hand units over to the CPU, on a card that is played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import CachePolicy, Decisions
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import filled
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.rules.broken import broken_rules
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.validate import load_unstreamed
from tests.runtime.ranks.test_handed_steps import RATES
from tests.runtime.sessions import CPU, opened
from tests.runtime.steppers import said
from tests.runtime.test_simulated import needed, plans, run, simulated
from tests.support import GPU, HostCopier, decisions, machine, plan_for

ROUNDED = 0.02
"""Of the largest logit, what BF16 rounds where the CPU's products sum in another order."""
FFN_BYTES = 3 * 64 * 160 * 2
BATCH = Batch([list(range(7, 29)), list(range(100, 109))], 6, 8)
"""Three passes of prompts, then five steps."""


def handed(plan: Plan, units: int) -> Plan:
    """``plan`` with so many FFN units on the CPU, or as many as DRAM keeps, on a machine that has timed its products."""
    weights = plan.decisions.weights
    made = replace(plan.decisions, weights=replace(weights, host=HostUnits(units, 2) if units else HostUnits()))
    hardware = replace(machine(True, host=RATES), gpu=replace(GPU, layer_kernels_s=1e-5))
    units = len(replace(plan, decisions=made).placement.host_units)
    made = replace(made, weights=replace(weights, host=HostUnits(units, 2) if units else HostUnits()))
    return replace(plan, hardware=hardware, decisions=made, prediction=predict(hardware, plan.model, plan.workload, made))


@pytest.mark.parametrize(
    ("units", "resident", "cap", "slots"), [(1, (1, 0, 0), 2, 4), (2, (0, 1, 1), 2, 4), (1, (0, 0, 1), 1, 5), (2, (6, 0, 0), 2, 3)]
)
def test_the_cpu_computes_units_between_layers_that_are_read(
    checkpoint: Path, units: int, resident: tuple[int, int, int], cap: int, slots: int
) -> None:
    """Two batches, so that prompts come behind steps, too. What DRAM reads is what the card alone would have it read."""
    made = decisions(gpu=True, batch=2, resident=resident, cap=cap, hwm=cap + 3, distance=cap + 1, slots=slots, vram_distance=1)
    plan = handed(plan_for(checkpoint, made, True), units)
    assert not [rule for rule in broken_rules(plan.hardware, plan.model, plan.workload, plan.decisions) if "host" in rule.name]
    assert plan.placement.ssd_layers and len(plan.placement.host_units) == units
    want = said(load_unstreamed(checkpoint, CPU), BATCH)
    for computed in (units, 0):
        with opened(handed(plan, computed), checkpoint, HostCopier(), keep_log=True) as session:
            session.load(BATCH)
            found = [session.generate(BATCH, Sampler(Sampling(), CPU), keep_logits=True) for _ in range(2)]
            facts, totals, log = session.engine.handed_facts, session.engine.stage_totals(), session.engine.dram.cache.stats.log
        for each in found:
            assert_close(each, want)
        if computed:
            assert facts == {"steps": 10, "refused": None}
            assert totals["cpu"][0] == 10 * units * FFN_BYTES
            logged = log
    assert facts is None and logged[: len(log) - 4] == log[: len(log) - 4], "but for what comes behind the last pass"


def assert_close(found: Generation, want: Generation) -> None:
    """Up to the first token in which rounding chose between two that are alike."""
    pairs = [(got, expected) for got, expected in zip(found.logits, want.logits, strict=True) if expected.numel()]
    assert len(pairs) > 1
    for got, expected in pairs:
        assert (got - expected).abs().max() < ROUNDED * expected.abs().max()
        if not torch.equal(got.argmax(-1), expected.argmax(-1)):
            break


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans(), st.integers(1, 4))
def test_loads_and_evictions_of_handed_steps_are_those_of_a_simulation(
    checkpoint: Path, make: Callable[[Path, bool], Plan], units: int
) -> None:
    plan = handed(make(checkpoint, True), units)
    ran, acted = run(plan, True, HostCopier()).dram.cache.stats, simulated(plan).cache
    shared = min(len(ran.log), len(acted.log))
    assert ran.log[:shared] == acted.log[:shared]
    assert shared >= needed(plan, True)


@given(st.integers(2, 90), st.data())
def test_what_streams_beside_what_is_read_divides_the_widest_gaps(total: int, data: st.DataObject) -> None:
    taken = sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1, max_size=total)))
    count = data.draw(st.integers(0, total - len(taken)))
    more = filled(count, total, taken)
    both = sorted({*taken, *more})
    assert len(more) == count and len(both) == len(taken) + count and both[-1] < total
    gaps = [after - at for at, after in zip(both, [*both[1:], both[0] + total], strict=True)]
    before = [after - at for at, after in zip(taken, [*taken[1:], taken[0] + total], strict=True)]
    assert max(gaps) <= max(before) and (len(taken) > 1 or max(gaps) - min(gaps) <= 1)


def test_a_plan_without_layers_that_are_read_has_no_more_units_than_dram_keeps(checkpoint: Path) -> None:
    """The rule names what is allowed."""
    made: Decisions = decisions(gpu=True, cap=2, hwm=5, distance=3, policy=CachePolicy.pinned)
    plan = handed(plan_for(checkpoint, made, True), 2)
    many = replace(plan.decisions, weights=replace(plan.decisions.weights, host=HostUnits(3, 2)))
    broken = broken_rules(plan.hardware, plan.model, plan.workload, many)
    assert any("the FFN units that DRAM keeps" in rule.message for rule in broken), broken
