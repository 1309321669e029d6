"""Coded weights in plans: what decoding costs, in which form residents stay, and the program against the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.bills.prefill import Prefill
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.planner.contract.decided.decisions import ResidentForms, Tier, WeightForm
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.formats import KNOWN_FORMATS, QUANTISED, Dtype, Format
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec
from penstock.planner.contract.lessons.corrections import slowed
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.decoding import decode_gelements, is_product, product_gbps, unit_s
from penstock.planner.contract.prices.memory_law import vram_use
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.prices.stages import weight_read_s
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.contract.stored.activations import named_activations
from penstock.planner.explain.purchases import offers
from penstock.planner.render.assumed import assumed
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.outcome import Told
from penstock.planner.simulate.simulated_work import passes_of
from penstock.planner.solver.notes.format_notes import format_notes
from penstock.planner.solver.planning import answer
from penstock.planner.solver.program import search, solve
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, MB, gpu, machine, model, with_units, work

INT4 = QUANTISED["INT4-128"]
NO_PRODUCT = replace(INT4, product_rows=0)
CODED = (UnitKind.attn, UnitKind.ffn, UnitKind.expert)


def coded(m: ModelSpec, form: Format = INT4) -> ModelSpec:
    """``m`` with the layers' units in ``form``."""

    def units() -> Iterator[UnitSpec]:
        for unit in m.units:
            if unit.kind in CODED:
                yield replace(unit, stored_bytes=form.stored_bytes(1, unit.elements), format=form)

    return replace(with_units(m, *units()), scratch_bytes=8 * MB)


def test_a_product_of_few_rows_reads_what_is_stored_and_one_of_many_decodes_first() -> None:
    hardware, unit = machine(), coded(model()).of_kind(UnitKind.attn)[0]
    few, many = unit_s(hardware, unit, INT4.product_rows), unit_s(hardware, unit, INT4.product_rows + 1)
    assert few == pytest.approx(unit.stored_bytes / product_gbps(hardware, INT4) / GB)
    assert many == pytest.approx(unit.elements / decode_gelements(hardware, INT4) / 1e9 + 2 * unit.elements / 800 / GB)
    assert unit_s(hardware, unit.decoded, 1) == pytest.approx(2 * unit.elements / 800 / GB)
    on_cpu = machine(0)
    decoding_s = unit.elements / decode_gelements(on_cpu, INT4) / 1e9 + 2 * unit.elements / 50 / GB
    assert unit_s(on_cpu, unit, 1) == pytest.approx(decoding_s), "no product was timed"
    timed = replace(on_cpu, cpu_products={"INT4-32": 20.0})
    assert unit_s(timed, unit, INT4.host_rows) == pytest.approx(unit.stored_bytes / 20 / GB)
    assert unit_s(timed, unit, INT4.host_rows + 1) == pytest.approx(decoding_s)
    lossless = coded(model(), QUANTISED["lossless"]).of_kind(UnitKind.attn)[0]
    assert not is_product(replace(on_cpu, cpu_products={"lossless": 20.0}), lossless.format, 1), "which is to give BF16's bits"


def test_measured_rates_stand_before_derived_ones_and_are_slowed_with_the_rate_of_weights() -> None:
    hardware = machine(gpu=gpu(decode={"INT4-128": 500.0}, products={"INT4-128": 600.0}))
    assert (decode_gelements(hardware, INT4), product_gbps(hardware, INT4)) == (500.0, 600.0)
    slower = slowed(hardware, {Figure.weights: 2.0})
    assert (decode_gelements(slower, INT4), product_gbps(slower, INT4)) == (250.0, 300.0)


def test_a_pass_reads_and_decodes_every_coded_unit_that_it_touches() -> None:
    m, hardware = coded(model(4, experts=8)), machine()
    attn, expert = m.of_kind(UnitKind.attn)[0], m.of_kind(UnitKind.expert)[0]
    router, head = m.of_kind(UnitKind.ffn)[0], m.lm_head
    one_s = 4 * (unit_s(hardware, attn, 1) + unit_s(hardware, router, 1) + 2 * unit_s(hardware, expert, 1)) + unit_s(hardware, head, 1)
    assert weight_read_s(hardware, m, 1) == pytest.approx(one_s)


@pytest.mark.parametrize(
    ("form", "batch", "want"),
    [
        (INT4, 1, WeightForm.stored),  # a product reads a quarter of the bytes
        (INT4, 32, WeightForm.decoded),  # each step would decode
        (NO_PRODUCT, 1, WeightForm.decoded),
    ],
)
def test_residents_stay_in_the_form_that_is_faster_where_all_fit(form: Format, batch: int, want: WeightForm) -> None:
    m, hardware, w = coded(model(), form), machine(64 * GB, layer_launch_s=1e-6), work(batch=batch, new_tokens=512)
    made = solve(hardware, m, w)
    assert made.weights.forms == ResidentForms(want, want)
    assert made.weights.vram.resident_units.attn == m.layers
    other = next(value for value in WeightForm if value is not want)
    forced = solve(hardware, m, w, Force(attn_form=other, ffn_form=other))
    assert forced.weights.forms == ResidentForms(other, other)
    assert predict(hardware, m, w, forced).total_s > predict(hardware, m, w, made).total_s


def test_what_stays_decoded_takes_its_decoded_bytes() -> None:
    m, hardware = coded(model()), machine(64 * GB)
    stored, decoded = (solve(hardware, m, work(), Force(attn_form=form, ffn_form=form)) for form in WeightForm)
    takes = [vram_use(hardware, m, work(), made) for made in (stored, decoded)]
    assert takes[1]["residents"] - takes[1]["embedding"] > 3 * (takes[0]["residents"] - m.head_bytes)
    assert takes[0]["scratch"] >= 8 * MB


@pytest.mark.parametrize("form", [INT4, NO_PRODUCT, QUANTISED["FP8"]])
@pytest.mark.parametrize("batch", [1, 24])
@pytest.mark.parametrize("ffn", WeightForm)
@pytest.mark.parametrize("attn", WeightForm)
@pytest.mark.parametrize("kernels_s", [0.0, 8e-5])
def test_a_simulated_card_computes_as_long_as_it_is_priced_whatever_form_residents_have(
    form: Format, batch: int, ffn: WeightForm, attn: WeightForm, kernels_s: float
) -> None:
    """Those of their kind that stream come as they are stored. A step that is launched takes no less than one that is recorded."""
    hardware = machine(1300 * MB, 4 * GB, gpu=gpu(layer_kernels_s=kernels_s))
    m, w = coded(model(8, 60 * MB, 240 * MB), form), work(batch=batch)
    made = solve(hardware, m, w, Force(attn_form=attn, ffn_form=ffn))
    plan = Plan(hardware, m, w, made, predict(hardware, m, w, made))
    assert len(plan.placement.streamed_units) < 16
    prefill, took, passes = Prefill(hardware, m, w, made), {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for some in passes_of(plan, tuple(unit for unit, _ in plan.placement.units), batch):
        took[some.each.prefill] += some.count * (sum(some.each.unit_ns) + some.each.before_ns) / 1e9
        passes[some.each.prefill] += some.count
    assert took[True] == pytest.approx(prefill.bill().of(Resource.card), rel=1e-3)
    assert took[False] / passes[False] == pytest.approx(prefill.step().of(Resource.card), rel=1e-3)


def test_what_is_not_coded_or_stays_on_no_card_has_one_form() -> None:
    for hardware, m in ((machine(), model()), (machine(0), coded(model()))):
        with pytest.raises(UserError, match="force.attn_form=decoded.*stored"):
            solve(hardware, m, work(), Force(attn_form=WeightForm.decoded))


@pytest.mark.parametrize("form", [INT4, NO_PRODUCT, QUANTISED["FP8"]])
@pytest.mark.parametrize(("vram", "dram"), [(0, 1300), (1100, 800), (1300, 4000), (3000, 4000)])
@pytest.mark.parametrize("experts", [0, 4])
def test_every_coded_plan_holds_every_rule_and_costs_what_the_program_says(form: Format, vram: int, dram: int, experts: int) -> None:
    hardware: HardwareProfile = machine(vram * MB, dram * MB)
    m = coded(model(8, 60 * MB, 240 * MB, experts=experts), form)
    for batch in (1, 24):
        w = work(batch=batch)
        found = search(hardware, m, w)
        assert broken_rules(hardware, m, w, found.decisions) == []
        predicted = predict(hardware, m, w, found.decisions)
        assert found.best_s * (1 - 1e-5) <= predicted.total_s <= found.best_s * 1.005 * (1 + 1e-6)
        for attn in WeightForm if vram else ():
            one = solve(hardware, m, w, Force(attn_form=attn, ffn_form=attn))
            assert predict(hardware, m, w, one).total_s >= found.best_s * (1 - 0.005)


def test_a_plan_s_placement_knows_each_unit_s_form() -> None:
    hardware, m = machine(700 * MB), coded(model(8, 60 * MB, 240 * MB), NO_PRODUCT)
    made = solve(hardware, m, work(), Force(attn_form=WeightForm.decoded, ffn_form=WeightForm.stored, resident_attn=3))
    from penstock.planner.contract.decided.placement import place

    placement = place(m, made.weights, True)
    for unit, lies in placement.units:
        decoded = lies is Tier.vram and unit.kind == "attn"
        assert placement.form(unit) is (WeightForm.decoded if decoded else WeightForm.stored)
        assert placement.kept_bytes(unit) == (placement.spec(unit).decoded_bytes if decoded else placement.unit_bytes(unit))


def test_explain_offers_what_fewer_bits_of_a_bf16_model_would_give() -> None:
    asked = Question(machine(700 * MB), model(8, 60 * MB, 240 * MB), work())
    found = {offer.key: offer.question.model for offer in offers(asked) if not offer.is_bought and offer.key != "batch"}
    layers = sum(asked.model.attn_bytes) + sum(asked.model.ffn_bytes)
    for key, share in (("lossless", (12 + 48 / 4096) / 16), ("int4", 4.125 / 16)):
        assert asked.model.weight_bytes - found[key].weight_bytes == pytest.approx(layers * (1 - share), rel=1e-3)
    assert not [offer for offer in offers(replace(asked, model=coded(asked.model))) if offer.key in found]


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "FP8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "FP4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"input_activations": {"num_bits": 8, "type": "int"}}}}, "INT8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"input_activations": None}}}, ""),
        ({"quant_method": "gptq", "bits": 4}, ""),
        ({"config_groups": [1]}, ""),
    ],
)
def test_dtypes_that_a_checkpoint_names_for_activations_are_said(said: dict[str, object], named: str) -> None:
    assert named_activations(said) == named
    asked = ModelConfig(name="x", config={"quantization_config": said | {"kv_cache_scheme": {"num_bits": 8}}})
    notes = list(format_notes(model(), asked, machine()))
    assert (f"the checkpoint names {named} for them" in notes[0]) is bool(named)
    assert notes[-1].startswith("KV stays bfloat16")


def test_solve_says_what_would_make_products_faster() -> None:
    halves = replace(model().stored_as(KNOWN_FORMATS["AWQ-128"]), compute_dtype=Dtype.float16)
    host = replace(machine(), host=HostRates(4, {"BF16": Curve(((1, 50.0),))}, 2e-5, 0.9, 0.9))
    plain = ModelConfig(name="x")
    (order, rates) = format_notes(halves, plain, host)
    assert order.startswith("numbers of AWQ-128 lie in another order") and "format=rows" in order
    assert "no rates of it with F16, which `planner probe` measures" in rates
    assert list(format_notes(halves, plain, machine())) == [order] and not list(format_notes(model(), plain, host))
    probed = replace(host, host=replace(host.host, f16_products={"AWQ-128": Curve(((1, 20.0),))}))
    assert list(format_notes(halves, plain, probed)) == [order]


def test_solve_says_how_fast_each_format_is_decoded_and_where_the_rate_is_from() -> None:
    said = {name: (rate, origin) for name, rate, origin in assumed(machine(), coded(model()))}
    assert "read at 560 GB/s" in said["INT4-128"][0] and said["INT4-128"][1].startswith("derived")
    hardware = machine(gpu=gpu(decode={"INT4-128": 123.0}), origin={"gpu.decode": "measured today"})
    assert ("INT4-128", "decoded at 123 G/s, read at 560 GB/s", "measured today") in assumed(hardware, coded(model()))
    assert "INT4-128" not in {name for name, *_ in assumed(machine(), model())}


@pytest.mark.parametrize(("form", "vram"), [(INT4, 900), (NO_PRODUCT, 1300), (NO_PRODUCT, 8000)])
def test_a_simulated_step_of_coded_weights_lasts_as_predicted(form: Format, vram: int) -> None:
    plan = answer(Question(machine(vram * MB, 8000 * MB), coded(model(8, 60 * MB, 240 * MB), form), work(new_tokens=16)))
    told = Told(Simulation(plan, Options()).run()).figures
    assert told["decode_s_per_token"] == pytest.approx(plan.prediction.decode_s_per_token, rel=0.12)
