"""FFN units that the CPU computes beside the card: where they lie, what they cost, and when there are none."""

import io
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from penstock.planner.common.errors import UserError
from penstock.planner.common.timeline.spans import CPU, H2D
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.checkpoint.ffn_activation import ffn_activation
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import Unit, place
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.formats import KNOWN_FORMATS, Dtype
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.on_cpu import host_rows_timed
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.explain.purchases import offers
from penstock.planner.explain.resources import products, resources
from penstock.planner.export.accelerate import ACCELERATE
from penstock.planner.export.exported import Request
from penstock.planner.export.otherwise import copied
from penstock.planner.export.wsm_env import ENV
from penstock.planner.render.assumed import products_beside
from penstock.planner.render.decided import decided
from penstock.planner.render.prediction_text import print_prediction
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.lanes.feed import RecordedFeed
from penstock.planner.simulate.lanes.lanes import Lanes, Work
from penstock.planner.simulate.outcome import Told
from penstock.planner.solver.program import optimum, solve
from penstock.planner.solver.terms.problem import Question
from penstock.planner.verbs.plan_diff import compare
from tests.planner.small import GB, MB, gpu, machine, model, work
from tests.planner.test_program_properties import PHASES, SLOWER, brute_force, machines, solved, workloads

RATES = HostRates(12, {"BF16": Curve(((1, 76.0), (16, 60.0)))}, 1e-5, 0.75, 0.84)
M = replace(model(16), ffn_activation="silu")


def beside(rates: HostRates | None = RATES, **change: object) -> HardwareProfile:
    """A card that records steps, with a fifth of the model's weights in VRAM."""
    return machine(vram=GB, dram=64 * GB, gpu=gpu(layer_kernels_s=8e-5), host=rates, **change)


def planned(h: HardwareProfile, m: ModelSpec) -> Plan:
    made = solve(h, m, work())
    return Plan(h, m, work(), made, predict(h, m, work(), made))


def test_cpu_and_link_work_at_once_and_a_step_takes_what_both_together_leave():
    made, alone = solve(beside(), M, work()), solve(beside(None), M, work())
    assert 0 < made.weights.host.ffn < 16 - made.weights.vram.resident_units.ffn
    assert made.weights.host.rows == 16 and alone.weights.host == HostUnits()
    predicted, before = predict(beside(), M, work(), made), predict(beside(None), M, work(), alone)
    stages = predicted.decode_stages
    assert predicted.decode_s_per_token < before.decode_s_per_token * 0.65
    assert predicted.decode_s_per_token == pytest.approx(max(*stages.values(), stages["card"] + stages["cpu"]))
    assert predicted.prefill_s == pytest.approx(before.prefill_s, rel=0.01)
    assert predicted.h2d_bytes_per_token == before.h2d_bytes_per_token - made.weights.host.ffn * 120 * MB


def test_the_cpu_computes_units_of_an_f16_model_where_its_rates_with_f16_are_known():
    """At its own rates; a profile of before they were timed means what it did, and says so."""
    halves = replace(M.stored_as(KNOWN_FORMATS["F16"]), compute_dtype=Dtype.float16, kv_dtype=Dtype.float16)
    before, known = beside(), beside(replace(RATES, f16_products={"F16": Curve(((1, 38.0), (8, 20.0)))}))
    assert solve(before, halves, work()).weights.host == HostUnits()
    with pytest.raises(UserError, match=r"force.host_ffn=4 .*no rates of the CPU with F16 \(`planner probe` measures them\)"):
        solve(before, halves, work(), Force(host_ffn=4))
    made = solve(known, halves, work())
    assert made.weights.host.ffn > 0 and host_rows_timed(known, halves) == 8 and host_rows_timed(known, M) == 16
    ours, theirs = (Beside.of(known, m, 1, made.weights.forms) for m in (halves, M))
    assert ours.alone_s(halves.of_kind(UnitKind.ffn)[0]) == pytest.approx(2 * theirs.alone_s(M.of_kind(UnitKind.ffn)[0]))
    assert not broken_rules(known, halves, work(), made)


def test_host_units_lie_in_dram_between_those_that_stream_and_pass_the_ring_in_prompts():
    h = beside()
    placement = Plan(h, M, work(), made := solve(h, M, work()), predict(h, M, work(), made)).placement
    assert len(placement.host_units) == made.weights.host.ffn
    assert set(placement.host_units) | set(placement.step_units) == set(placement.streamed_units)
    assert not set(placement.host_units) & set(placement.step_units)
    outside = [unit for unit in placement.streamed_units if unit.kind == "ffn"]
    gaps = [outside.index(b) - outside.index(a) for a, b in zip(placement.host_units, placement.host_units[1:], strict=False)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    "h, m",
    [
        (beside(replace(RATES, products={"BF16": Curve(((1, 0.5), (16, 0.5)))})), M),
        (beside(replace(RATES, hop_s=0.1)), M),
        (beside(dram_bus_gbps=50.0), M),
        (beside(replace(RATES, products={"FP8": RATES.products["BF16"]})), M),
        (beside(), replace(M, state_bytes=MB)),
        (replace(beside(), gpu=gpu()), M),
        (replace(beside(), dram_bytes=GB), M),
        (machine(vram=0, dram=64 * GB, host=None), M),
    ],
    ids=["slow CPU", "slow hops", "shared bus", "no product", "states", "no recorded steps", "SSD passes", "no card"],
)
def test_the_cpu_computes_nothing_where_that_is_slower_or_cannot_be(h, m):
    made = solve(h, m, work())
    assert made.weights.host == HostUnits()
    forced = replace(made, weights=replace(made.weights, host=HostUnits(4, 16)))
    assert broken_rules(h, m, work(), forced) or predict(h, m, work(), forced).total_s >= predict(h, m, work(), made).total_s / 1.005


def test_more_rows_than_the_cpu_is_planned_for_stream():
    h = beside()
    made = solve(h, M, work(batch=3), Force(host_ffn=6, host_rows=2))
    assert made.weights.host == HostUnits(6, 2)
    streaming = replace(made, weights=replace(made.weights, host=HostUnits()))
    assert predict(h, M, work(batch=3), made) == predict(h, M, work(batch=3), streaming)


def test_a_forced_split_is_kept_and_an_impossible_one_is_refused_with_its_reason():
    h = beside()
    counts = [solve(h, M, work(), Force(host_ffn=n)).weights.host.ffn for n in (0, 1, 16)]
    assert counts == [0, 1, 16]
    with pytest.raises(UserError, match=r"force.host_ffn=17 .*allowed: 0 to 16, the FFN units that DRAM keeps"):
        solve(h, M, work(), Force(host_ffn=17))
    with pytest.raises(UserError, match=r"force.host_ffn=1 .*allowed: 0, since the hardware profile has no rates of the CPU") as refused:
        solve(beside(None), M, work(), Force(host_ffn=1))
    assert "set force.host_ffn=0" in str(refused.value), "the remedy names what was set, not what follows from it"
    with pytest.raises(UserError, match=r"force.host_rows=17 .*allowed: 0 to 16 for the format"):
        solve(h, M, work(), Force(host_rows=17))


def test_a_plan_with_host_units_is_written_read_shown_and_compared(tmp_path):
    h = beside()
    made, alone = solve(h, M, work()), solve(beside(None), M, work())
    plans = [Plan(on, M, work(), d, predict(on, M, work(), d)) for on, d in ((h, made), (beside(None), alone))]
    for plan, name in zip(plans, "ab", strict=True):
        write_plan(plan, tmp_path / name)
    again = read_plan(tmp_path / "a")
    assert (again.decisions, again.hardware.host, again.model.ffn_activation) == (made, RATES, "silu")
    without = (tmp_path / "b").read_text()
    assert "host: {ffn: 0, rows: 0, head: 0, near: 0}" in without
    for before in ("", "  host: {ffn: 0, rows: 0}\n"):
        (tmp_path / "b").write_text(without.replace("  host: {ffn: 0, rows: 0, head: 0, near: 0}\n", before))
        assert read_plan(tmp_path / "b").decisions == alone, "a plan of a version without the one or the other"
    row = {subject: (words, aside) for subject, words, aside in decided(plans[0])}
    assert row["CPU"] == (f"{made.weights.host.ffn} ffn, 0 head", "up to 16 rows")
    assert "CPU" not in dict((s, w) for s, w, _ in decided(plans[1]))
    changed = compare(*plans[::-1])
    assert "weights.host.ffn" in str(changed)


@settings(max_examples=6, deadline=None, derandomize=True, phases=PHASES)
@given(st.data())
def test_the_program_equals_brute_force_with_units_of_the_cpu(data):
    m = replace(model(3, data.draw(st.integers(5, 60)) * MB, data.draw(st.integers(80, 300)) * MB, 20 * MB), ffn_activation="silu")
    h, w = data.draw(machines(m, True)), replace(data.draw(workloads(False)), prompt_tokens=data.draw(st.integers(1, 500)))
    shares = data.draw(st.tuples(st.floats(0.5, 1), st.floats(0.5, 1)))
    rate = h.gpu.h2d.peak * data.draw(st.floats(0.2, 2))
    rates = HostRates(4, {"BF16": Curve(((1, rate), (8, rate * 0.7)))}, data.draw(st.sampled_from([0.0, 1e-5, 1e-3])), *shares)
    h = replace(h, gpu=replace(h.gpu, layer_kernels_s=8e-5), host=rates, ssd_read=h.ssd_read[:1])
    h = replace(h, vram_bytes=int(400 * MB + data.draw(st.floats(0.1, 0.7)) * m.weight_bytes), dram_bytes=GB + m.weight_bytes)
    found = solved(h, m, w)
    assume(found)
    best = min(brute_force_with(h, m, w, replace(found.decisions.weights.host, ffn=n), found.decisions) for n in range(m.layers + 1))
    assert found.best_s == pytest.approx(best, rel=1e-5)
    assert predict(h, m, w, found.decisions).total_s <= best * SLOWER


@pytest.mark.parametrize("card_gbps", [60.0, 100.0, 800.0])
@pytest.mark.parametrize("share", [0.65, 0.75])
@pytest.mark.parametrize("units", [1, 2, 4, 8])
def test_copies_slow_few_units_no_longer_than_the_cpu_is_at_them(card_gbps: float, share: float, units: int):
    """Beside a slow card a step was predicted to take up to 1.4 times what it takes."""
    h, w = beside(replace(RATES, beside_h2d=share, h2d_beside=share), dram_bus_gbps=300.0), work(new_tokens=16)
    h = replace(h, gpu=replace(h.gpu, memory_gbps=card_gbps))
    made = solve(h, M, w, Force(host_ffn=units))
    plan = Plan(h, M, w, made, predict(h, M, w, made))
    simulated_s = Told(Simulation(plan).run()).figures["decode_s_per_token"]
    assert plan.prediction.decode_s_per_token == pytest.approx(simulated_s, rel=0.05)


def brute_force_with(h, m, w, host, base):
    rows = max(w.batch, host.rows)
    made = replace(base, weights=replace(base.weights, host=HostUnits(host.ffn, min(8, rows) if host.count else 0, host.head)))
    return brute_force(h, m, w, made)


@pytest.mark.parametrize(
    "config, names, expected",
    [
        ({"model_type": "llama", "hidden_act": "silu"}, "gate_proj up_proj down_proj", "silu"),
        ({"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"}, "gate_proj up_proj down_proj", "gelu_tanh"),
        ({"model_type": "gemma3_text"}, "gate_proj up_proj down_proj", "gelu_tanh"),
        ({"model_type": "phi", "hidden_act": "gelu_new"}, "fc1 fc2", "gelu_tanh"),
        ({"model_type": "phi3", "hidden_act": "silu"}, "gate_up_proj down_proj", ""),
        ({"model_type": "llama", "hidden_act": "relu2"}, "gate_proj up_proj down_proj", ""),
        ({"model_type": "llama"}, "gate_proj up_proj down_proj", ""),
        ({"model_type": "llama", "hidden_act": "silu"}, "gate_proj up_proj down_proj norm", ""),
        ({"model_type": "falcon_h1", "hidden_act": "silu"}, "gate_proj up_proj down_proj", ""),
    ],
)
def test_an_ffn_is_known_by_its_family_its_activation_and_its_projections(config, names, expected):
    layer = ["self_attn.q_proj.weight", "input_layernorm.weight", *(f"mlp.{name}.weight" for name in names.split())]
    assert ffn_activation(config, [layer, [*layer, f"mlp.{names.split()[0]}.weight_scale"]]) == expected


@pytest.mark.parametrize("target", [ACCELERATE, ENV], ids=lambda target: target.name)
def test_an_export_says_what_an_engine_without_the_cpu_beside_it_loses(target):
    h = beside(dram_copy_gbps=40.0)
    made = solve(h, M, work())
    plan = Plan(h, M, work(), made, predict(h, M, work(), made))
    losses = target.export(Request(plan, "plan")).losses
    first, alone = losses.lost[0], copied(plan).prediction.decode_tokens_per_s
    assert first.decided == f"{made.weights.host.ffn} FFN units that the CPU computes" and first.tokens_per_s == pytest.approx(alone)
    assert alone < plan.prediction.decode_tokens_per_s
    assert not losses.together_tokens_per_s or losses.together_tokens_per_s <= alone * 1.0001


def test_explain_says_what_more_channels_and_cores_give_where_the_cpu_computes():
    q = Question(beside(), M, work())
    found = {offer.key: offer.question.hardware for offer in offers(q)}
    assert {"channels", "cores"} <= set(found) and not {"channels", "cores"} & {o.key for o in offers(q.on(beside(None)))}
    channels, base = found["channels"], optimum(q)
    assert (channels.dram_bus_gbps, channels.host.peak_gbps, channels.host.beside_h2d) == (240.0, 152.0, 1.0)
    assert optimum(q.on(channels)).decode_s < base.decode_s * 0.75
    assert found["cores"].host.peak_gbps == 120.0


def test_the_cpus_products_are_told_as_the_model_computes_with_them():
    """A format's own rate, in F16 its rate with F16; none where none is known. Twice the cores are no faster than the bus."""
    curve = Curve(((1, 38.0), (8, 20.0)))
    both = replace(RATES, products={**RATES.products, "FP8": Curve(((1, 50.0),))}, f16_products={"F16": curve, "FP8": Curve(((1, 9.0),))})
    f16 = replace(M.stored_as(KNOWN_FORMATS["F16"]), compute_dtype=Dtype.float16, kv_dtype=Dtype.float16)
    fp8 = M.stored_as(KNOWN_FORMATS["FP8"])
    models = (M, f16, fp8, replace(fp8, compute_dtype=Dtype.float16))
    assert [products(m).of(beside(both)) for m in models] == [76.0, 38.0, 50.0, 9.0]
    assert products(f16).of(beside(RATES)) == 0.0 and "host" not in [r.key for r in resources(beside(RATES), f16)]
    (cores,) = (offer for offer in offers(Question(beside(both), f16, work())) if offer.key == "cores")
    assert "(CPU products of 38 to 76 GB/s)" in cores.name
    assert cores.question.hardware.host.products["BF16"].points == ((1, 120.0), (16, 120.0))


def test_a_plan_says_by_which_rates_the_cpu_multiplies_and_from_where_they_are():
    h = replace(beside(), origin={"host.products": "measured today"})
    assert list(products_beside(planned(h, M))) == [("CPU", "76 GB/s of BF16", "measured today")]
    assert list(products_beside(planned(replace(h, host=None), M))) == []
    rates = replace(RATES, f16_products={"F16": Curve(((1, 38.0), (8, 20.0)))})
    f16 = replace(M.stored_as(KNOWN_FORMATS["F16"]), compute_dtype=Dtype.float16, kv_dtype=Dtype.float16)
    assert [said for _, said, _ in products_beside(planned(replace(h, host=rates), f16))] == ["38 GB/s of F16"]


def test_what_has_no_spread_is_named_behind_the_interval():
    """Runs correct neither the bus nor the CPU's products: a step that these bind is no narrower for that."""
    said = {}
    for name, h in {"cpu": beside(), "bus": beside(dram_bus_gbps=90.0), "card": beside(None)}.items():
        console = Console(record=True, width=400, file=io.StringIO())
        print_prediction(planned(h, M), console)
        said[name] = console.export_text()
    assert "The rate of the CPU's products is taken as stated." in said["cpu"]
    assert "The rate of the DRAM bus and of the CPU's products is taken as stated." in said["bus"]
    assert "taken as stated" not in said["card"]


def test_one_row_is_no_rows():
    h = beside(replace(RATES, products={"BF16": Curve(((1, 76.0),))}))
    assert "up to 1 row" in [aside for subject, _, aside in decided(planned(h, M)) if subject == "CPU"]


def test_where_an_ffn_is_copied_long_three_units_of_attention_have_slots():
    """While the CPU computes one FFN the link is at another; the card waits for attention behind that one."""
    slow = {"vram": 2 * GB, "dram": 64 * GB, "host": RATES}
    m, w = replace(model(24), ffn_activation="silu"), work(new_tokens=16)
    link = replace(gpu(layer_kernels_s=8e-5), h2d=Curve(((MB, 26.0), (256 * MB, 26.0))))
    h = machine(gpu=link, **slow)
    halves = Force(vram_ffn_slots=0)
    took, attention = [], []
    for force in (Force(), halves, Force(vram_slots=4)):
        made = solve(h, m, w, force)
        assert made.weights.host.ffn > 8
        attention.append(place(m, made.weights, True).ring_classes["attn"][0])
        took.append(Told(Simulation(Plan(h, m, w, made, predict(h, m, w, made))).run()).figures["decode_s_per_token"])
    assert attention == [3, 3, 2] and took[0] < 0.99 * took[1] and took[1] < 0.97 * took[2]
    quick = replace(link, h2d=Curve(((MB, 55.0), (256 * MB, 55.0))))
    assert solve(machine(gpu=quick, **slow), m, w, halves).weights.vram.slots == 4


def test_the_bus_carries_what_the_cpu_reads_of_the_models_own_format():
    """Another format's product is three times as fast: beside that one, copies would have a third of this bus."""
    int4 = KNOWN_FORMATS["INT4-128"]
    h = beside(replace(RATES, products={"BF16": Curve(((1, 120.0),)), int4.name: Curve(((1, 40.0),))}, h2d_beside=1.0), dram_bus_gbps=100.0)
    m, w = replace(model(16, 480 * MB), ffn_activation="silu").stored_as(int4), work(new_tokens=16)
    made = solve(h, m, w, Force(host_ffn=5))
    plan = Plan(h, m, w, made, predict(h, m, w, made))
    simulated = Told(Simulation(plan).run()).figures["decode_s_per_token"]
    assert plan.prediction.decode_s_per_token == pytest.approx(simulated, rel=0.06)


def test_simulated_steps_have_a_lane_for_the_cpu_and_prompts_have_none():
    h, asked = beside(), work(new_tokens=40)
    made = solve(h, M, asked)
    told = Told(Simulation(Plan(h, M, asked, made, predict(h, M, asked, made))).run())
    predicted, step_s = told.plan.prediction.decode_s_per_token, told.figures["decode_s_per_token"]
    assert predicted * 0.99 < step_s < predicted * 1.15
    assert told.busy("prefill", CPU) == 0 and told.busy("decode", CPU) > 0.7 and told.busy("decode", H2D) > 0.7
    assert told.waits()["compute waits for cpu"][0] == 39 * made.weights.host.ffn
    copied = told.plan.placement.step_units
    assert told.bytes("decode", Resource.h2d) == pytest.approx(39 * sum(map(told.plan.placement.unit_bytes, copied)), rel=0.1)


def test_link_and_cpu_slow_each_other_only_while_both_are_at_work():
    lanes = Lanes({}, {CPU: 0.5, H2D: 0.8})
    ends = {}
    for track, length in ((CPU, 100), (H2D, 400)):
        lanes.add(track, Work((track,), track, 0, lambda track=track: ends.update({track: lanes.now})), length)
    while lanes.step():
        pass
    assert ends[CPU] == 200 and ends[H2D] == 200 + (400 - 160)


def test_a_recorded_step_copies_into_a_slot_once_the_unit_there_is_left():
    units = [Unit("ffn", i) for i in range(3)]
    lanes = Lanes({}, {})
    feed = RecordedFeed(units, {"ffn": 2}, lambda unit: (10, 1), lanes)
    feed.begin_pass()
    while lanes.step():
        pass
    order = []
    for unit in units:
        while not feed.ready(unit):
            lanes.step()
        order.append((unit.layer, lanes.now))
        feed.leave(unit)
    while lanes.step():
        pass
    assert order == [(0, 20), (1, 20), (2, 30)] and [feed.ready(unit) for unit in units] == [True, True, False]
