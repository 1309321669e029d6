"""Decode steps that are recorded: when they are, and what the program makes of it."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.planner.common.measures import show_seconds
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import head_blocks, place
from penstock.planner.contract.decided.recording import can_record, launched_because
from penstock.planner.contract.given.dealt import Dealt
from penstock.planner.contract.given.formats import KNOWN_FORMATS
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.launches import (
    MOST_COPIES,
    is_recorded,
    issue_s,
    keeps_link_busier,
    pieces_issue_s,
    recorded_launch_s,
    step_issue_s,
)
from penstock.planner.contract.prices.price import SHARED, Price, Resource
from penstock.planner.contract.prices.stages import recorded_s
from penstock.planner.contract.published.config_spec import spec_from_config
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.explain.constraints import constraints
from penstock.planner.explain.explanation import _launched
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.outcome import Told
from penstock.planner.simulate.simulated_work import passes_of
from penstock.planner.solver.program import search, solve
from tests.planner.small import GB, MB, gpu, machine, model, work
from tests.planner.test_presets import hardware as preset
from tests.planner.test_presets import hardware_from
from tests.planner.test_program_properties import PHASES, QUICK, SLOWER, brute_force, machines, models, solved, workloads

LAUNCH_S, KERNELS_S = 5e-3, 1e-5
"""Of a layer: launching binds wherever steps are not recorded."""


def recording(hardware: HardwareProfile) -> HardwareProfile:
    made = hardware.gpu and replace(hardware.gpu, layer_kernels_s=KERNELS_S)
    return replace(hardware, gpu=made, layer_launch_s=LAUNCH_S)


def decided(hardware: HardwareProfile, m: ModelSpec, w: Workload) -> tuple[Decisions, bool]:
    decisions = solve(hardware, m, w)
    return decisions, is_recorded(hardware, place(m, decisions.weights, hardware.gpu is not None), decisions.kv)


def test_a_step_is_recorded_whatever_streams_from_dram():
    hardware, m = recording(machine(vram=GB)), model(16)
    decisions, is_one = decided(hardware, m, work())
    assert is_one and place(m, decisions.weights, True).streamed_units
    assert predict(hardware, m, work(), decisions).decode_stages["card"] < LAUNCH_S


def test_a_step_whose_link_binds_by_far_is_launched_and_takes_no_longer():
    """Of the same bytes, on hosts that launch them in a little less and a little more than what leaves the link busy all the time."""
    slow, m, w = recording(machine(vram=GB)), model(16), work()
    assert slow.gpu is not None
    decisions = solve(slow, m, w)
    placement = place(m, decisions.weights, True)
    border_s = placement.h2d_bytes_per_pass / slow.gpu.h2d.peak / 1e9 * (1 / SHARED - 1) / m.layers
    below, above = (replace(slow, layer_launch_s=share * border_s) for share in (0.99, 1.01))
    assert keeps_link_busier(below, placement) and not is_recorded(below, placement, decisions.kv)
    assert not keeps_link_busier(above, placement) and is_recorded(above, placement, decisions.kv)
    launched, recorded = (Plan(one, m, w, decisions, predict(one, m, w, decisions)) for one in (below, above))
    assert launched.prediction.decode_s_per_token == pytest.approx(recorded.prediction.decode_s_per_token, rel=0.005)
    told = [Told(Simulation(plan, Options()).run()).figures["decode_s_per_token"] for plan in (launched, recorded)]
    assert told[0] == pytest.approx(told[1], rel=0.005)
    assert not list(_launched(launched)), "nobody waits for launches"


def test_a_step_is_not_launched_for_the_link_where_nothing_streams_or_the_cpu_takes_part_or_ranks_do():
    quick, m = replace(recording(machine(vram=GB)), layer_launch_s=1e-9), model(16)
    decisions = solve(quick, m, work())
    streams = place(m, decisions.weights, True)
    host = replace(decisions.weights, host=HostUnits(ffn=2, rows=4))
    assert keeps_link_busier(quick, streams)
    assert not keeps_link_busier(quick, place(m, host, True))
    assert not keeps_link_busier(quick, replace(streams, model=replace(m, dealt=Dealt(0, 2, (0, 1) * 8, m.vocab, False))))
    assert not keeps_link_busier(replace(quick, gpu=None), streams)
    resident = place(m, solve(replace(quick, vram_bytes=64 * GB), m, work()).weights, True)
    assert not resident.streamed_units and not keeps_link_busier(replace(quick, layer_launch_s=0.0), resident)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hardware": {"gpu": None}}, "the CPU"),
        ({"hardware": {"dram_bytes": 900 * MB}}, "from the SSD"),
        ({"model": {"model_type": "falcon"}}, "code of their own"),
        ({"hardware": {"vram_bytes": 500 * MB}, "model": {"experts": 4}}, "between routed experts"),
        ({"kv": 1}, "outside VRAM"),
    ],
)
def test_what_keeps_a_step_from_being_recorded_is_named(change: dict, why: str):
    hardware = replace(recording(machine(vram=GB)), **change.get("hardware", {}))
    m = replace(model(16, experts=change.get("model", {}).get("experts", 0)))
    m = replace(m, **{key: value for key, value in change.get("model", {}).items() if key != "experts"})
    placement = place(m, solve(hardware, m, work()).weights, hardware.gpu is not None)
    assert why in (launched_because(placement, change.get("kv", 0)) or "")


def test_a_machine_without_such_attention_launches():
    hardware, m = replace(recording(machine()), gpu=gpu(layer_kernels_s=0.0)), model()
    decisions, is_one = decided(hardware, m, work())
    assert not is_one and not can_record(hardware, m)
    assert predict(hardware, m, work(), decisions).decode_s_per_token >= m.layers * LAUNCH_S


@pytest.mark.parametrize("experts", [0, 4])
def test_shorter_passes_that_are_not_taken_cost_nothing(experts: int):
    """Of a long prompt: each choice of passes binds where it is taken alone."""
    hardware, m, w = machine(vram=GB), model(16, experts=experts), work(prompt_tokens=8192, new_tokens=2)
    found, forced = solved(hardware, m, w), search(hardware, m, w, Force(prefill_chunk_tokens=8192))
    assert found is not None and found.best_s <= forced.best_s * (1 + 1e-6)
    assert predict(hardware, m, w, found.decisions).total_s <= found.best_s * SLOWER


def test_who_waits_for_launches_is_told_why_steps_are_not_recorded():
    hardware, m = replace(recording(machine()), gpu=gpu(layer_kernels_s=0.0)), replace(model(), model_type="falcon")
    for machine_, why in ((hardware, "falcon models attend by code of their own"), (recording(machine()), "falcon models")):
        decisions, _ = decided(machine_, m, work())
        plan = Plan(machine_, m, work(), decisions, predict(machine_, m, work(), decisions))
        (said,) = (line for line in _launched(plan) if line.startswith("Decode"))
        assert "hardware.layer_launch_s" in said and why in said
    decisions, _ = decided(recording(machine()), model(), work())
    recorded = Plan(recording(machine()), model(), work(), decisions, predict(recording(machine()), model(), work(), decisions))
    assert not any(line.startswith("Decode") for line in _launched(recorded))


def test_who_waits_for_a_step_in_pieces_is_told_how_long():
    hardware, m = recording(machine()), model(8, experts=4)
    decisions, is_one = decided(hardware, m, work())
    plan = Plan(hardware, m, work(), decisions, predict(hardware, m, work(), decisions))
    waits_s = pieces_issue_s(hardware, m, decisions.batch)
    assert is_one and waits_s > 0
    (said,) = (line for line in _launched(plan) if line.startswith("Decode"))
    assert f"waits {show_seconds(waits_s)} of {show_seconds(plan.prediction.decode_s_per_token)}" in said and "8 pieces" in said
    assert any(c.note.endswith(f"{show_seconds(waits_s)} of it launching behind routers") for c in constraints(plan, ()))
    assert "hardware.layer_launch_s" in said
    assert hardware.gpu is not None
    copies = replace(plan, hardware=replace(hardware, gpu=replace(hardware.gpu, copy_s=0.9 * hardware.layer_launch_s / MOST_COPIES)))
    assert "hardware.gpu.copy_s" in next(line for line in _launched(copies) if line.startswith("Decode"))
    assert not any(line.startswith("Decode") for line in _launched(replace(plan, hardware=replace(hardware, layer_launch_s=0.0))))


def test_a_host_that_launches_slowly_is_told_of_its_copies_where_it_hardly_launches():
    """Of recorded steps alone; what is launched kernel by kernel takes as long as a launched layer says."""
    m, slow = model(8, experts=4), replace(recording(machine()), layer_launch_s=1.3e-3)
    known, quick = (replace(slow, gpu=replace(slow.gpu, copy_s=copy_s)) for copy_s in (8e-5, 1e-6))
    assert recorded_launch_s(slow) == 1.3e-3 and recorded_launch_s(replace(slow, gpu=None)) == 1.3e-3
    assert recorded_launch_s(known) == pytest.approx(MOST_COPIES * 8e-5) and recorded_launch_s(quick) < recorded_launch_s(known)
    assert recorded_launch_s(replace(known, layer_launch_s=1e-4)) == 1e-4, "a host that launches quickly"
    share = MOST_COPIES * 8e-5 / 1.3e-3
    for told in (step_issue_s(known, m) / step_issue_s(slow, m), pieces_issue_s(known, m, 1) / pieces_issue_s(slow, m, 1)):
        assert told == pytest.approx(share)
    assert pieces_issue_s(known, m, 2) == pieces_issue_s(slow, m, 2), "experts of several tokens are launched"
    assert issue_s(known, m, 1) == issue_s(slow, m, 1)


@pytest.mark.parametrize(("layers", "measured_s"), [(2, 0.00154), (12, 0.00444)], ids=["all in VRAM", "nothing moved"])
def test_steps_of_gpt_oss_in_pieces_take_what_an_h200_took(layers: int, measured_s: float) -> None:
    """bench/results/h200/gpt_oss.json of 2026-11-24."""
    plain = yaml.safe_load((resources.files("conf") / "model" / "gpt-oss-120b.yaml").read_text())["config"]
    config = plain | {"num_hidden_layers": layers, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
    spec = spec_from_config(config, "gpt-oss", "config.json", dict)
    assert recorded_s(hardware_from(preset("h200")), spec, 152, 1) == pytest.approx(measured_s, rel=0.06)


def test_a_simulation_computes_recorded_steps_as_predicted():
    hardware, m, w = recording(machine(vram=GB)), model(16), work()
    decisions, _ = decided(hardware, m, w)
    plan = Plan(hardware, m, w, decisions, predict(hardware, m, w, decisions))
    units = tuple(unit for unit, _ in plan.placement.units)
    steps = [found for found in passes_of(plan, units, 1) if not found.each.prefill]
    mean_ns = sum(found.count * (sum(found.each.unit_ns) + found.each.before_ns) for found in steps) / sum(found.count for found in steps)
    assert mean_ns / 1e9 == pytest.approx(plan.prediction.decode_stages["card"], rel=0.01)


@pytest.mark.parametrize(
    ("launches_s", "copies_s", "measured_s"),
    [(0.0702, 0.071, 0.100), (0.0702, 0.082, 0.101), (0.075, 0.0527, 0.0926), (0.075, 0.0638, 0.0965), (0.054, 0.127, 0.1262)],
    ids=["INT4, H100", "FP8, H100", "INT4, H200", "FP8, H200", "lossless, H200"],
)
def test_a_launched_step_lasts_as_measured(launches_s: float, copies_s: float, measured_s: float):
    step = Price({Resource.h2d: copies_s, Resource.card: launches_s}, issued=launches_s)
    assert step.lasts() == pytest.approx(measured_s, rel=0.06)


def test_a_coded_product_is_launched_by_more_of_the_host():
    hardware, plain = recording(machine()), model()
    coded = plain.stored_as(KNOWN_FORMATS["INT4-128"])
    assert issue_s(hardware, coded, 1) == pytest.approx(issue_s(hardware, plain, 1) * (1 + 35 / 59))
    assert issue_s(replace(hardware, gpu=None), coded, 1) == issue_s(replace(hardware, gpu=None), plain, 1)


@settings(QUICK, max_examples=25)
@given(st.data())
def test_plans_whose_steps_are_recorded_cost_what_the_program_says(data):
    m = data.draw(models())
    hardware, w = recording(data.draw(machines(m, True))), data.draw(workloads())
    found = solved(hardware, m, w)
    assume(found)
    assert broken_rules(hardware, m, w, found.decisions) == []
    assert found.best_s * (1 - 1e-5) <= predict(hardware, m, w, found.decisions).total_s <= found.best_s * SLOWER


@settings(max_examples=3, deadline=None, derandomize=True, phases=PHASES)
@given(st.data())
def test_the_program_equals_brute_force_where_steps_are_recorded(data):
    m = data.draw(models(3, 4))
    assume(head_blocks(m) <= 2 and m.experts is None)
    hardware, w = recording(data.draw(machines(m, True))), data.draw(workloads(False))
    found = solved(hardware, m, w)
    assume(found)
    assert found.best_s == pytest.approx(brute_force(hardware, m, w, found.decisions), rel=1e-5)


def test_kv_that_would_spill_stays_where_launching_costs_more():
    hardware, m = recording(machine(vram=GB)), model(16)
    w = work(batch=2, prompt_tokens=700, new_tokens=100, kv_spill=True)
    decisions, is_one = decided(hardware, m, w)
    assert is_one and not decisions.kv.of(Tier.dram)
