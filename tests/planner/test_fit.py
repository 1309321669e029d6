"""One run teaches the planner what its machine is like, however wrong the profile was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.corrections import slowed
from planner.cost import predict
from planner.decisions import Decisions
from planner.errors import UserError
from planner.fit import Fitted, Measured, fit
from planner.hardware import Curve, HardwareProfile
from planner.model import ModelSpec
from planner.program import solve
from planner.stages import Stage, ssd_gbps
from planner.workload import Workload
from tests.planner.small import GB, MB, gpu, machine, model, work

FACTORS = st.floats(0.25, 4.0)


def wrong(hardware: HardwareProfile, ssd: float, link: float, back: float, step: float, products: float, copy: float) -> HardwareProfile:
    """The machine that ``hardware`` is a wrong profile of: each stage so many times as fast as it says."""

    def curve(of: Curve, by: float) -> Curve:
        return Curve(tuple((size, rate * by) for size, rate in of.points))

    card = hardware.gpu and replace(
        hardware.gpu,
        h2d=curve(hardware.gpu.h2d, link),
        h2d_while_ssd_gbps=hardware.gpu.h2d_while_ssd_gbps * link,
        d2h=curve(hardware.gpu.d2h, back),
        ssd_while_h2d_gbps=hardware.gpu.ssd_while_h2d_gbps * ssd,
        memory_gbps=hardware.gpu.memory_gbps * step,
        dense_tflops=hardware.gpu.dense_tflops * products,
        attention_tflops=hardware.gpu.attention_tflops * products,
    )
    return replace(
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


def acted_out(true: HardwareProfile, m: ModelSpec, w: Workload, decisions: Decisions) -> Measured:
    """What a run on the ``true`` machine would report, the page cache being cold but for enough to time it."""
    p = predict(true, m, w, decisions)
    return Measured(
        prefill={Stage(name): s for name, s in p.prefill_stages.items()},
        decode={Stage(name): s for name, s in p.decode_stages.items()},
        prefill_s=p.prefill_s,
        decode_s=p.decode_s_per_token,
        load_s=p.load_s,
        ssd_gbps=ssd_gbps(true, decisions.weights.ssd.block_bytes, decisions.weights.ssd.queue_depth),
        h2d_gbps=true.gpu.h2d.points[-1][1] if true.gpu else None,
        dram_copy_gbps=true.dram_copy_gbps,
        pin_s_per_gb=true.pin_s_per_gb,
    )


def taught(hardware: HardwareProfile, fitted: Fitted) -> HardwareProfile:
    return replace(slowed(hardware, fitted.slow), pass_s=fitted.pass_s, start_s=fitted.start_s)


@st.composite
def cases(draw: st.DrawFn) -> tuple[HardwareProfile, ModelSpec, Workload]:
    """Machines with and without a GPU, with memory for all, some or hardly any of a dense or MoE model."""
    m = model(draw(st.integers(4, 16)), ffn=128 * MB, experts=draw(st.sampled_from([0, 0, 8])))
    card = gpu(h2d_while_ssd_gbps=draw(st.sampled_from([55.0, 50.0, 35.0])), ssd_while_h2d_gbps=draw(st.sampled_from([0.0, 5.0])))
    vram, dram = draw(st.sampled_from([0, 0.9, 1.6, 16])), draw(st.sampled_from([0.9, 1.5, 64]))
    hardware = machine(vram=int(vram * GB), dram=int(dram * GB))
    hardware = replace(hardware, gpu=card if vram else None)
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


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases(), factors=st.tuples(*[FACTORS] * 6))
def test_after_one_run_the_prediction_is_right_and_the_new_plan_no_worse(case, factors):
    hardware, m, w = case
    decisions = planned(hardware, m, w)
    assume(decisions is not None)
    true = wrong(hardware, *factors)
    known = taught(hardware, fit(hardware, m, w, decisions, acted_out(true, m, w, decisions)))
    said, was = predict(known, m, w, decisions), predict(true, m, w, decisions)
    for name in ("prefill_s", "decode_s_per_token", "load_s", "total_s"):
        assert getattr(said, name) == pytest.approx(getattr(was, name), rel=0.05), name
    again = solve(known, m, w)
    assert predict(true, m, w, again).total_s <= was.total_s * 1.01
