"""One run teaches the planner what its machine is like, however wrong the profile was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import load_s, predict
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.lessons.corrections import slowed
from penstock.planner.contract.lessons.fit import MOST, Fitted, Measured, fit
from penstock.planner.contract.prices.stages import Stage, ssd_gbps
from penstock.planner.solver.program import search, solve
from tests.planner.small import GB, MB, gpu, machine, model, work

FACTORS = st.floats(0.25, 4.0)
OF_THIS_PLAN, OF_ANOTHER_PLAN = 0.08, 0.125
"""A run tells nothing of what bound none of its stages. Found among some hundred draws: 5.1 % of the plan that ran; 10 % of another one's
prompt, whose waits for experts stand on products that had bound nothing."""


def wrong(hardware: HardwareProfile, ssd: float, link: float, back: float, step: float, products: float, copy: float) -> HardwareProfile:
    """The machine that ``hardware`` is a wrong profile of: each stage so many times as fast as it says."""

    def curve(of: Curve, by: float) -> Curve:
        return Curve(tuple((size, rate * by) for size, rate in of.points))

    card = hardware.gpu and replace(
        hardware.gpu,
        h2d=curve(hardware.gpu.h2d, link),
        d2h=curve(hardware.gpu.d2h, back),
        memory_gbps=hardware.gpu.memory_gbps * step,
        dense_tflops=hardware.gpu.dense_tflops * products,
        attention_tflops=hardware.gpu.attention_tflops * products,
    )
    other = replace(
        hardware,
        ssd_read=tuple(replace(point, gbps=point.gbps * ssd) for point in hardware.ssd_read),
        ssd_write_gbps=hardware.ssd_write_gbps * ssd,
        dram_copy_gbps=hardware.dram_copy_gbps * copy,
        pin_s_per_gb=hardware.pin_s_per_gb / copy,
        cpu_matvec_gbps=hardware.cpu_matvec_gbps * step,
        cpu_dense_tflops=hardware.cpu_dense_tflops * products,
        layer_launch_s=hardware.layer_launch_s / step,
        gpu=card,
    )
    return slowed(other, {})  # a memory bus that carries less than one link alone is no machine


def told(resources: dict[str, float]) -> dict[Stage, float]:
    """As a run's clock has it: one thing computes, and nobody times the bus."""
    links = {stage: resources[stage] for stage in (Stage.ssd, Stage.h2d, Stage.d2h)}
    return links | {Stage.compute: resources["card"] + resources["cpu"]}


def acted_out(true: HardwareProfile, m: ModelSpec, w: Workload, decisions: Decisions) -> Measured:
    """What a run on the ``true`` machine would report, the page cache being cold but for enough to time it."""
    p = predict(true, m, w, decisions)
    return Measured(
        prefill=told(p.prefill_stages),
        decode=told(p.decode_stages),
        prefill_s=p.prefill_s,
        decode_s=p.decode_s_per_token,
        load_s=p.load_s,
        ssd_gbps=ssd_gbps(true, decisions.weights.ssd.block_bytes, decisions.weights.ssd.queue_depth),
        h2d_gbps=true.gpu.h2d.points[-1][1] if true.gpu else None,
        dram_copy_gbps=true.dram_copy_gbps,
        pin_s_per_gb=true.pin_s_per_gb,
    )


def taught(hardware: HardwareProfile, fitted: Fitted) -> HardwareProfile:
    return replace(slowed(hardware, fitted.slow), pass_s=fitted.pass_s or 0.0, start_s=fitted.start_s or 0.0)


@st.composite
def cases(draw: st.DrawFn, moe: bool, card: bool) -> tuple[HardwareProfile, ModelSpec, Workload]:
    """Machines with memory for all, some or hardly any of a model, and work of all kinds."""
    m = model(draw(st.integers(4, 16)), ffn=128 * MB, experts=8 if moe else 0)
    bus = draw(st.sampled_from([0.0, 40.0, 120.0]))
    vram, dram = draw(st.sampled_from([0.9, 1.6, 16])) if card else 0, draw(st.sampled_from([0.9, 1.5, 64]))
    hardware = replace(machine(vram=int(vram * GB), dram=int(dram * GB)), gpu=gpu() if card else None, dram_bus_gbps=bus)
    kept = draw(st.sampled_from([0, 0, 1024]))
    w = work(
        batch=draw(st.sampled_from([1, 4, 32])),
        prompt_tokens=draw(st.sampled_from([16, 512, 4096])),
        kept_tokens=kept,
        kv_spill=draw(st.booleans()),
    )
    return hardware, m, replace(w, shared_prefix_tokens=min(kept, w.prompt_tokens) // 2)


def planned(hardware: HardwareProfile, m: ModelSpec, w: Workload) -> Decisions | None:
    try:
        return solve(hardware, m, w)
    except UserError:
        return None


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("card", [False, True])
@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data(), factors=st.tuples(*[FACTORS] * 6))
def test_after_one_run_the_prediction_is_right_and_the_new_plan_no_worse(data, factors, moe, card):
    hardware, m, w = data.draw(cases(moe, card))
    decisions = planned(hardware, m, w)
    assume(decisions is not None)
    true = wrong(hardware, *factors)
    known = taught(hardware, fit(hardware, m, w, decisions, acted_out(true, m, w, decisions)))
    again = solve(known, m, w)
    for made, within in ((decisions, OF_THIS_PLAN), (again, OF_ANOTHER_PLAN)):
        said, was = predict(known, m, w, made), predict(true, m, w, made)
        for name in ("prefill_s", "decode_s_per_token", "load_s", "total_s"):
            assert getattr(said, name) == pytest.approx(getattr(was, name), rel=within), name
    assert predict(true, m, w, again).total_s <= predict(true, m, w, decisions).total_s * 1.01


SLOW_BACK = gpu(d2h=Curve(((2**26, 0.25),)))
STARTS = machine(vram=GB, pin_s_per_gb=10.0)
"""What locks memory for longer than it reads."""


@pytest.mark.parametrize("factor", [0.25, 4.0])
@pytest.mark.parametrize(
    "hardware, spill, figure, figures",
    [
        (machine(vram=1400 * MB, dram=8 * GB, gpu=SLOW_BACK), True, Figure.d2h, ("prefill_s",)),
        (STARTS, False, Figure.page_lock, ("load_s",)),
        (machine(pin_s_per_gb=0.0, dram_copy_gbps=1.0), False, Figure.dram_copy, ("cached_load_s",)),
    ],
)
def test_what_binds_a_start_or_the_way_back_is_learnt_in_one_run(hardware, spill, figure, figures, factor):
    m, w = model(12), work(kv_spill=spill, prompt_tokens=4096, batch=16 if spill else 1)
    decisions, true = solve(hardware, m, w), slowed(hardware, {figure: factor})
    known = taught(hardware, fit(hardware, m, w, decisions, acted_out(true, m, w, decisions)))

    def error(of: HardwareProfile) -> float:
        said, was = ({**vars(predict(h, m, w, decisions)), "cached_load_s": load_s(h, m, w, decisions, 1.0)} for h in (of, true))
        return max(abs(said[name] / was[name] - 1) for name in figures)

    assert error(hardware) > 0.05 > error(known)


def run_on(true: HardwareProfile, **less: object) -> tuple[Fitted, HardwareProfile, Decisions]:
    """A small profile, a plan by it, and what a run on ``true`` teaches; ``less`` is what it did not measure."""
    hardware, m, w = machine(vram=GB, dram=GB), model(12), work()
    decisions = solve(hardware, m, w)
    return fit(hardware, m, w, decisions, replace(acted_out(true, m, w, decisions), **less)), hardware, decisions


def test_a_right_profile_is_left_as_it_is():
    fitted, _, _ = run_on(machine(vram=GB, dram=GB))
    assert all(factor == pytest.approx(1.0) for factor in fitted.slow.values())
    assert fitted.pass_s == pytest.approx(0.0, abs=1e-9) and fitted.start_s == pytest.approx(0.0, abs=1e-9)


def test_what_a_run_did_not_measure_is_not_told():
    fitted, _, _ = run_on(slowed(machine(vram=GB, dram=GB), {Figure.d2h: 2.0}), prefill={}, prefill_s=None, ssd_gbps=None, load_s=None)
    assert Figure.products not in fitted.slow and Figure.d2h not in fitted.slow and fitted.start_s is None
    assert {Figure.ssd, Figure.h2d, Figure.weights} <= set(fitted.slow)


def test_what_no_stage_explains_is_of_each_pass_and_of_the_start():
    true = replace(machine(vram=GB, dram=GB), pass_s=0.02, start_s=3.0)
    fitted, _, _ = run_on(true)
    assert (fitted.pass_s, fitted.start_s) == pytest.approx((0.02, 3.0))


def test_a_stage_that_stood_still_for_another_reason_moves_no_rate_without_end():
    fitted, _, _ = run_on(slowed(machine(vram=GB, dram=GB), {Figure.ssd: 1e4}))
    assert fitted.slow[Figure.ssd] == pytest.approx(MOST)


def test_a_plan_is_made_with_the_seconds_of_each_pass():
    m, w = model(12), work(prompt_tokens=4096)
    hardware = replace(machine(vram=GB, dram=GB), pass_s=0.5)
    found = search(hardware, m, w)
    assert found.best_s * (1 - 1e-6) <= predict(hardware, m, w, found.decisions).total_s <= found.best_s * 1.0051
    without = solve(replace(hardware, pass_s=0.0), m, w)
    assert found.decisions.prefill_chunk_tokens >= without.prefill_chunk_tokens


def test_a_start_is_predicted_to_be_as_long_as_it_was_however_long_imports_hid_the_page_locking():
    hardware = machine(vram=GB)
    m, w = model(12), work()
    decisions = solve(hardware, m, w)
    seen = replace(acted_out(hardware, m, w, decisions), pin_s_per_gb=20.0, load_s=12.0)
    known = taught(hardware, fit(hardware, m, w, decisions, seen))
    assert predict(known, m, w, decisions).load_s == pytest.approx(12.0)
    again = fit(hardware, m, w, decisions, replace(seen, pin_s_per_gb=1.0))
    assert again.slow[Figure.page_lock] == pytest.approx(1.0 / hardware.pin_s_per_gb), "a start that was long for another reason"


def test_a_few_tokens_that_took_long_say_nothing_of_products():
    """A prompt of 16 tokens computes for as long as its operations take to issue; one of 4096 for its products."""
    m, hardware = model(), replace(machine(vram=2 * GB), layer_launch_s=1e-3)
    for tokens, expected in ((16, False), (4096, True)):
        w = work(prompt_tokens=tokens)
        decisions = solve(hardware, m, w)
        seen = acted_out(hardware, m, w, decisions)
        slow = replace(seen, prefill={**seen.prefill, Stage.compute: 3 * seen.prefill[Stage.compute]})
        assert (Figure.products in fit(hardware, m, w, decisions, slow).slow) == expected
