"""Blocks of the LM head that the CPU computes beside the card: what they gain, where they lie, and when there are none."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.common.timeline.spans import CPU, H2D
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.planner.contract.config.geometry import spec_from_geometry
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.formats import KNOWN_FORMATS
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.explain.constraints import constraints
from penstock.planner.render.decided import decided
from penstock.planner.render.stage_names import IN_TURN, decode_bound
from penstock.planner.render.step_lanes import lanes
from penstock.planner.render.whereabouts import computed_by
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.outcome import Told
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.program import search, solve
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, MB, gpu, machine, model, work
from tests.planner.test_host_units import RATES, brute_force_with
from tests.planner.test_presets import load
from tests.planner.test_program_properties import PHASES, SLOWER, machines, workloads

M = replace(model(16, table=480 * MB), ffn_activation="silu")
"""Its head is four blocks of an FFN's bytes, and as much as a fifth of the layers."""
TIGHT = machine(vram=700 * MB, dram=64 * GB, gpu=gpu(layer_kernels_s=8e-5), host=RATES)


def planned(h: HardwareProfile, m: ModelSpec, w: Workload, **fixed: object) -> Plan:
    made = solve(h, m, w, Force(**fixed))
    return Plan(h, m, w, made, predict(h, m, w, made))


def simulated_s(plan: Plan) -> float:
    return Told(Simulation(plan).run()).figures["decode_s_per_token"]


def test_where_vram_is_tight_the_cpu_computes_blocks_that_the_link_would_bring_while_it_rests():
    plan, none = planned(TIGHT, M, work(new_tokens=16)), planned(TIGHT, M, work(new_tokens=16), host_head=0)
    assert plan.decisions.weights.host.head > 0 == none.decisions.weights.host.head
    assert plan.prediction.decode_s_per_token < 0.97 * none.prediction.decode_s_per_token
    assert simulated_s(plan) < 0.97 * simulated_s(none)
    assert plan.prediction.prefill_s == pytest.approx(none.prediction.prefill_s, rel=0.02)


@pytest.mark.parametrize("blocks", range(5))
@pytest.mark.parametrize("ffn", [0, 8])
def test_the_law_says_what_steps_take_in_a_simulation(blocks: int, ffn: int):
    plan = planned(TIGHT, M, work(new_tokens=16), host_head=blocks, host_ffn=ffn, resident_head=0)
    assert (plan.decisions.weights.host.head, plan.decisions.weights.host.ffn) == (blocks, ffn)
    longest = 1.09 if blocks > 2 and not ffn else 1.04
    assert 0.97 < plan.prediction.decode_s_per_token / simulated_s(plan) < longest, "a ring that the link cannot fill has room at the end"


def test_the_last_blocks_are_the_cpus_and_stream_in_prompts():
    plan = planned(replace(TIGHT, vram_bytes=900 * MB), M, work(new_tokens=16), host_head=2, resident_head=1)
    placement = plan.placement
    head = [unit for unit in placement.host_units if unit.kind == "head"]
    assert head == [Unit("head", 2), Unit("head", 3)] == list(placement.host_units)[-2:]
    assert set(head) <= set(placement.streamed_units) and not set(head) & set(placement.step_units)
    assert Unit("head", 1) in placement.step_units
    told = Told(Simulation(plan).run())
    copied = sum(map(placement.unit_bytes, placement.step_units))
    assert told.bytes("decode", Resource.h2d) == pytest.approx(15 * copied, rel=0.1)
    assert plan.prediction.h2d_bytes_per_token == copied
    assert told.busy("prefill", CPU) == 0 < told.busy("decode", CPU) and told.busy("decode", H2D) > 0
    assert computed_by(plan)["CPU, where they lie"] == sum(map(placement.unit_bytes, placement.host_units))


def waits_of(plan: Plan) -> list[str]:
    """Names of what `explain` says that a decode step waits for beyond its resources."""
    resources = {f"decode: {name}" for name in ("DRAM bus", "H2D", "D2H", "compute", "CPU")}
    return [one.name for one in constraints(plan, ()) if one.name.startswith("decode") and one.name not in resources]


def test_a_link_that_rests_while_the_ring_is_full_is_not_taken_for_card_and_cpu_in_turn():
    """Nor for the host, which launches such a step at once."""
    plan = planned(TIGHT, M, work(new_tokens=16), host_head=1, host_ffn=0, resident_head=0)
    stages = plan.prediction.decode_stages
    assert stages["card"] + stages["cpu"] < stages["h2d"] < plan.prediction.decode_s_per_token
    assert waits_of(plan) == ["decode: full ring"] and decode_bound(plan) == "H2D"
    assert [lane.stage for lane in lanes(plan)][-1] == "full ring"
    in_turn = planned(TIGHT, M, work(new_tokens=16), host_ffn=16)
    assert waits_of(in_turn) == [f"decode: {IN_TURN}"] and decode_bound(in_turn) == IN_TURN


def test_seconds_of_drafts_are_named_beside_what_a_step_without_them_waits_for():
    plan = planned(TIGHT, M, work(new_tokens=16), host_ffn=16)
    drafted = replace(plan.decisions, speculation=Speculation(Drafter.lookup, 3, 0.3))
    verifying = replace(plan, decisions=drafted, prediction=predict(plan.hardware, plan.model, plan.workload, drafted))
    assert verifying.prediction.decode_s_per_token > plan.prediction.decode_s_per_token
    assert waits_of(verifying) == [f"decode: {IN_TURN}", "decode: drafts"]
    assert lanes(verifying)[-1].parts[-1].end_s == pytest.approx(verifying.prediction.decode_s_per_token)


def test_a_step_of_which_nothing_is_copied_has_the_cpu_compute_the_head():
    """All else stays in VRAM."""
    h = machine(vram=7 * GB // 2, dram=64 * GB, gpu=gpu(layer_kernels_s=8e-5), host=RATES)
    plan = planned(h, M, work(new_tokens=16), resident_attn=16, resident_ffn=16, resident_head=0, host_head=4, host_ffn=0)
    assert not plan.placement.step_units and plan.prediction.h2d_bytes_per_token == 0
    assert plan.prediction.decode_s_per_token == pytest.approx(simulated_s(plan), rel=0.02)


def test_blocks_that_are_forced_are_kept_and_refused_with_the_reason():
    w, kept = work(new_tokens=16), []
    for n in (0, 1, 4):
        kept.append(solve(TIGHT, M, w, Force(host_head=n)).weights.host.head)
    assert kept == [0, 1, 4]
    assert solve(TIGHT, M, w, Force(host_ffn=0)).weights.host == HostUnits(), "nobody asked for blocks"
    with pytest.raises(UserError, match=r"force.host_head=5 .*allowed: 0 to 4, the LM head's blocks outside VRAM"):
        solve(TIGHT, M, w, Force(host_head=5))
    with pytest.raises(UserError, match=r"force.host_head=1 .*allowed: 0, since the hardware profile has no rates of the CPU"):
        solve(replace(TIGHT, host=None), M, w, Force(host_head=1))
    alone = replace(TIGHT, host=replace(RATES, products={"FP8": RATES.products["BF16"]}))
    with pytest.raises(UserError, match=r"force.host_head=1 .*allowed: 0, since the CPU has no product with this LM head"):
        solve(alone, M, w, Force(host_head=1))
    with pytest.raises(UserError, match=r"force.host_rows=17 .*allowed: 1 to 16 for the format of the LM head"):
        solve(TIGHT, M, w, Force(host_head=1, host_rows=17))
    with pytest.raises(UserError, match=r"force.host_head=1 .*allowed: 0, since the LM head of several ranks is computed by their cards"):
        answer_dealt(Question(replace(TIGHT, devices=(0, 1)), M, w, Force(host_head=1), ranks=2))


def test_a_pass_of_more_rows_streams_all_blocks():
    made = solve(TIGHT, M, work(batch=3, new_tokens=16), Force(host_head=2, host_ffn=0, host_rows=2))
    assert made.weights.host == HostUnits(0, 2, 2)
    streaming = replace(made, weights=replace(made.weights, host=HostUnits()))
    w = work(batch=3, new_tokens=16)
    assert predict(TIGHT, M, w, made) == predict(TIGHT, M, w, streaming)


@pytest.mark.parametrize(
    "h, m",
    [
        (replace(TIGHT, host=replace(RATES, products={"BF16": Curve(((1, 0.5), (16, 0.5)))})), M),
        (replace(TIGHT, host=replace(RATES, beside_h2d=0.4, h2d_beside=0.5)), M),
        (replace(TIGHT, host=replace(RATES, hop_s=0.1)), M),
        (replace(TIGHT, gpu=gpu()), M),
        (replace(TIGHT, dram_bytes=2 * GB), M),
        (TIGHT, replace(M, state_bytes=MB)),
        (machine(vram=4 * GB, dram=64 * GB, gpu=gpu(layer_kernels_s=8e-5), host=RATES), M),
    ],
    ids=["slow CPU", "slow together", "slow hops", "no recorded steps", "SSD passes", "states", "all stays"],
)
def test_the_card_computes_all_of_the_head_where_the_cpu_gains_nothing(h: HardwareProfile, m: ModelSpec):
    made = solve(h, m, work(new_tokens=16), Force(vram_ffn_slots=0))
    assert made.weights.host.head == 0
    forced = replace(made, weights=replace(made.weights, host=replace(made.weights.host, head=2, rows=16)))
    w = work(new_tokens=16)
    assert broken_rules(h, m, w, forced) or predict(h, m, w, forced).total_s >= predict(h, m, w, made).total_s / 1.01


def test_a_cpu_that_knows_no_ffn_of_the_model_may_know_its_head():
    plan = planned(TIGHT, replace(M, ffn_activation=""), work(new_tokens=16))
    assert plan.decisions.weights.host.ffn == 0 < plan.decisions.weights.host.head
    assert plan.decisions.weights.host.rows == 16 and not broken_rules(plan.hardware, plan.model, plan.workload, plan.decisions)


def test_a_tied_head_is_computed_like_another():
    m = replace(model(16, table=480 * MB, tied=True), ffn_activation="silu")
    plan = planned(TIGHT, m, work(new_tokens=16), host_head=3, resident_head=0)
    assert plan.prediction.decode_s_per_token == pytest.approx(simulated_s(plan), rel=0.07)


def test_a_plan_with_such_blocks_is_written_read_shown_and_compared(tmp_path):
    plan = planned(TIGHT, M, work(new_tokens=16), host_head=3, host_ffn=8, resident_head=0)
    write_plan(plan, tmp_path / "plan")
    assert read_plan(tmp_path / "plan").decisions == plan.decisions
    assert "host: {ffn: 8, rows: 16, head: 3, near: 0}" in (tmp_path / "plan").read_text()
    row = {subject: (words, aside) for subject, words, aside in decided(plan)}
    assert row["CPU"] == ("8 ffn, 3 head", "up to 16 rows")


def test_int4_of_8b_in_little_vram_leaves_its_bf16_head_to_the_cpu():
    """A head in BF16 is multiplied nearly as fast as the bus goes; layers in four bits are bound by arithmetic."""
    form = KNOWN_FORMATS["INT4-128"]
    m = replace(spec_from_geometry(load("model", "llama8b", ModelConfig)), ffn_activation="silu").stored_as(form)
    rates = HostRates(14, {"BF16": Curve(((1, 137.0), (16, 89.0))), form.name: Curve(((1, 95.0), (16, 36.0)))}, 2e-5, 0.85, 0.84)
    h = machine(vram=2 * 2**30, dram=64 * GB, gpu=gpu(layer_kernels_s=6e-5, memory_gbps=2700.0), host=rates, dram_bus_gbps=150.0)
    plan, none = planned(h, m, work(new_tokens=16)), planned(h, m, work(new_tokens=16), host_head=0)
    assert plan.decisions.weights.host.head > 4
    assert simulated_s(plan) < 0.95 * simulated_s(none)
    assert plan.prediction.decode_s_per_token == pytest.approx(simulated_s(plan), rel=0.06)


@settings(max_examples=6, deadline=None, derandomize=True, phases=PHASES)
@given(st.data())
def test_the_program_equals_brute_force_with_blocks_of_the_cpu(data):
    m = replace(model(2, data.draw(st.integers(5, 60)) * MB, data.draw(st.integers(80, 200)) * MB, 400 * MB), ffn_activation="silu")
    h, w = data.draw(machines(m, True)), replace(data.draw(workloads(False)), prompt_tokens=data.draw(st.integers(1, 500)))
    shares = data.draw(st.tuples(st.floats(0.55, 1), st.floats(0.55, 1)))
    rate = h.gpu.h2d.peak * data.draw(st.floats(0.2, 3))
    rates = HostRates(4, {"BF16": Curve(((1, rate), (8, rate * 0.7)))}, data.draw(st.sampled_from([0.0, 1e-5])), *shares)
    h = replace(h, gpu=replace(h.gpu, layer_kernels_s=8e-5), host=rates, ssd_read=h.ssd_read[:1])
    h = replace(h, vram_bytes=int(400 * MB + data.draw(st.floats(0.1, 0.7)) * m.weight_bytes), dram_bytes=GB + m.weight_bytes)
    try:
        found = search(h, m, w, Force(vram_slots=4))  # a ring of the program's own is as wide as an FFN wants, which the law does not know
    except Infeasible:
        assume(False)
    made, blocks = found.decisions, found.decisions.weights.head_blocks
    least = {
        head: min(brute_force_with(h, m, w, HostUnits(ffn, made.weights.host.rows, head), made) for ffn in range(m.layers + 1))
        for head in range(blocks + 1)
    }
    best = min(least.values())
    best = best if best * 1.01 < least[0] else least[0]
    assert found.best_s == pytest.approx(best, rel=1e-5)
    assert predict(h, m, w, made).total_s <= best * SLOWER
