"""Layers that the CPU attends to beside the card: where they lie, what they cost, and when there are none."""

import io
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from penstock.planner.common.errors import UserError
from penstock.planner.common.timeline.spans import CPU
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.bills.phase import decode_phase
from penstock.planner.contract.decided.decisions import KvPages, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.kv_tiers import attended_on_host, kv_tiers
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.render.decided import decided
from penstock.planner.render.prediction_text import print_prediction
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.solver.program import solve
from tests.planner.small import GB, gpu, machine, model, work
from tests.planner.test_program_properties import SLOWER, machines, models, solved, workloads

RATES = HostRates(12, {"BF16": Curve(((1, 76.0), (16, 60.0)))}, 1e-5, 0.9, 0.9, 90.0, 1e-4)
M = replace(model(16), kv_elements=None, kv_width=2048)
LONG = work(batch=8, prompt_tokens=16000, new_tokens=64, kv_spill=True)


def beside(rates: HostRates | None = RATES, **change: object) -> HardwareProfile:
    """A card that holds the weights, and a third of the KV."""
    return replace(machine(vram=9 * GB, dram=64 * GB, host=rates), **change)


def planned(h: HardwareProfile, w=LONG, **force: object) -> Plan:
    made = solve(h, M, w, Force(**force))
    return Plan(h, M, w, made, predict(h, M, w, made))


def test_link_and_cpu_share_the_layers_outside_vram_and_a_step_is_as_long_as_either():
    made, alone = planned(beside()), planned(beside(), host_attention=0)
    kv = made.decisions.kv
    outside = kv.dram_pages * 16 // kv.pages
    assert 0 < kv.host_layers < outside and alone.decisions.kv.host_layers == 0
    stages = made.prediction.decode_stages
    assert made.prediction.decode_s_per_token == pytest.approx(max(*stages.values(), stages["card"] + stages["cpu"]))
    assert made.prediction.decode_s_per_token < 0.7 * alone.prediction.decode_s_per_token
    assert made.prediction.prefill_s == pytest.approx(alone.prediction.prefill_s, rel=0.02)
    chosen, tiers = attended_on_host(16, kv), kv_tiers(16, kv)
    assert len(chosen) == kv.host_layers and {tiers[layer] for layer in chosen} == {Tier.dram}


def test_launches_go_on_while_the_cpu_attends_for_as_long_as_it_does():
    """16 layers take 48 ms to launch, 1.3 of them kernels."""
    h = beside(gpu=gpu(layer_kernels_s=8e-5), layer_launch_s=3e-3)
    made, one = planned(h), planned(h, host_attention=1)
    stages, alone = made.prediction.decode_stages, one.prediction.decode_stages
    phase = decode_phase(h, M, LONG, 8, made.decisions.weights.head_blocks)
    assert stages["card"] + stages["cpu"] - made.prediction.decode_s_per_token <= phase.launches.of(Resource.card) + 1e-9
    assert made.prediction.decode_s_per_token < stages["card"] + stages["cpu"] - 0.5 * phase.launches.of(Resource.card)
    assert one.prediction.decode_s_per_token >= max(alone["h2d"], alone["card"])
    acted = Simulation(made, Options()).run()
    assert made.prediction.decode_s_per_token == pytest.approx(acted.record.step_ns[-1] / 1e9, rel=0.05)


@pytest.mark.parametrize(
    "h, m, w",
    [
        (beside(None), M, LONG),
        (beside(replace(RATES, attention_gbps=0.0)), M, LONG),
        (beside(replace(RATES, attention_gbps=1.0)), M, LONG),
        (beside(replace(RATES, attention_hop_s=1.0)), M, LONG),
        (beside(dram_bus_gbps=50.0), M, LONG),
        (beside(), M, replace(LONG, kv_spill=False, prompt_tokens=500)),
        (machine(vram=0, dram=64 * GB), M, LONG),
    ],
    ids=["no rates", "not measured", "slow CPU", "slow hops", "shared bus", "all in VRAM", "no card"],
)
def test_the_cpu_attends_to_nothing_where_that_is_slower_or_cannot_be(h, m, w):
    found = solved(h, m, w)
    assert found is None or found.decisions.kv.host_layers == 0


def test_a_forced_number_is_kept_and_an_impossible_one_is_refused_with_its_reason():
    counts = [planned(beside(), host_attention=n).decisions.kv.host_layers for n in (1, 5)]
    assert counts == [1, 5]
    with pytest.raises(UserError, match=r"force.host_attention=2 .*allowed: 0, since the hardware profile has no rate of attention"):
        solve(beside(None), M, LONG, Force(host_attention=2))


def test_a_plan_is_written_read_and_shown(tmp_path):
    made = planned(beside())
    write_plan(made, tmp_path / "a")
    again = read_plan(tmp_path / "a")
    assert (again.decisions, again.hardware.host) == (made.decisions, RATES)
    assert ("attention", f"of {made.decisions.kv.host_layers} layers by the CPU") in {row[:2] for row in decided(again)}
    text = (tmp_path / "a").read_text()
    (tmp_path / "b").write_text(text.replace(f", host_layers: {made.decisions.kv.host_layers}", ""))
    assert read_plan(tmp_path / "b").decisions.kv == replace(made.decisions.kv, host_layers=0)
    served = replace(LONG, clients=8)
    assert any("mix prompts and rows" in rule.message for rule in broken_rules(again.hardware, M, served, made.decisions))
    assert broken_rules(again.hardware, M, LONG, replace(made.decisions, kv=replace(made.decisions.kv, host_layers=17)))


def test_a_plan_whose_weights_stay_and_whose_kv_streams_is_not_told_that_nothing_does():
    out = io.StringIO()
    print_prediction(planned(beside(), resident_attn=16, resident_ffn=16, resident_head=1), Console(file=out, width=400))
    text = out.getvalue()
    assert "All weights fit in VRAM. A part of KV does not." in text and "streaming buys nothing" not in text
    assert "and of the CPU's attention is taken as stated." in text


@settings(max_examples=14, deadline=None, derandomize=True)
@given(st.data())
def test_the_program_says_what_predictions_say_and_more_choice_is_never_slower(data):
    m = data.draw(models(most=8))
    assume(m.experts is None)
    h, w = data.draw(machines(m, True)), replace(data.draw(workloads(True)), batch=3)
    h = replace(h, vram_bytes=h.vram_bytes + m.weight_bytes, dram_bytes=32 * GB)
    rates = replace(RATES, attention_gbps=data.draw(st.floats(1, 200)), beside_h2d=data.draw(st.floats(0.3, 1)))
    m = replace(m, kv_width=32768)
    with_host = replace(h, host=replace(rates, products={}))
    found, without = solved(with_host, m, w), solved(h, m, w)
    assume(found)
    predicted = predict(with_host, m, w, found.decisions)
    assert found.best_s * (1 - 1e-5) <= predicted.total_s <= found.best_s * SLOWER
    assert broken_rules(with_host, m, w, found.decisions) == []
    assert found.best_s <= without.best_s * (1 + 1e-6)


def test_a_simulated_step_is_as_long_as_predicted_and_prompts_stream():
    plan = planned(beside())
    acted = Simulation(plan, Options(keep_spans=True)).run()
    steps = acted.record.step_ns
    assert sum(steps[2:]) / len(steps[2:]) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=0.12)
    attended = [span for span in acted.record.spans if span.track == CPU and span.name.startswith("kv.")]
    assert len(attended) >= plan.decisions.kv.host_layers
    assert acted.record.prefill_ns[0] / 1e9 == pytest.approx(plan.prediction.prefill_s, rel=0.1)


@pytest.mark.parametrize("left, beside_it", [(0.45, 0.9), (0.9, 0.5), (0.5, 0.6)])
def test_what_attention_and_the_link_leave_each_other_may_differ_from_what_products_do(left, beside_it):
    usual, own = planned(beside()), replace(RATES, attention_beside_h2d=left, h2d_beside_attention=beside_it)
    plan = planned(beside(own), host_attention=usual.decisions.kv.host_layers)
    assert plan.prediction.decode_s_per_token > 1.05 * usual.prediction.decode_s_per_token
    alike = planned(beside(replace(RATES, beside_h2d=left, h2d_beside=beside_it)), host_attention=plan.decisions.kv.host_layers)
    assert plan.prediction.decode_s_per_token == pytest.approx(alike.prediction.decode_s_per_token)
    steps = Simulation(plan, Options()).run().record.step_ns
    assert sum(steps[2:]) / len(steps[2:]) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=0.12)


def test_layers_of_the_cpu_lie_between_those_that_stream():
    kv = KvPages(64, 0, 16 * 2, 0, host_layers=8)
    assert attended_on_host(16, kv) == tuple(range(1, 16, 2)) or attended_on_host(16, kv) == tuple(range(0, 16, 2))
