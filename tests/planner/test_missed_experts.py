"""Plans that share missed experts between the link and the CPU."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.timeline.spans import COMPUTE, CPU, EXPERTS
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import ExpertPolicyName, MissedExperts
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.formats import KNOWN_FORMATS
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.launches import is_recorded
from penstock.planner.contract.prices.stages import expert_step_s
from penstock.planner.explain.resources import products
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.lanes.bus_shares import bus_shares
from penstock.planner.simulate.simulated_work import passes_of
from penstock.planner.solver.program import search
from tests.planner.small import GB, MB, machine, model, work

MIXTRAL = replace(model(8, experts=8), model_type="mixtral")


def with_host(gbps: float, **changed: object) -> HardwareProfile:
    """A card of 600 MB, and a CPU that multiplies at ``gbps``."""
    host = HostRates(2, {"BF16": Curve(((1, gbps), (8, gbps)))}, 2e-5, 1.0, 1.0)
    return machine(vram=600 * MB, dram=4 * GB, host=host, **changed)


@pytest.mark.parametrize(("rows", "together"), [(1, True), (4, False)])
def test_a_card_computes_one_tokens_experts_behind_the_last_and_those_of_several_rows_as_they_come(rows: int, together: bool) -> None:
    hardware, work_ = machine(vram=600 * MB, dram=4 * GB), work(batch=rows, requests=rows, new_tokens=12)
    made = search(hardware, MIXTRAL, work_, Force(expert_policy=ExpertPolicyName.lru)).decisions
    plan = Plan(hardware, MIXTRAL, work_, made, predict(hardware, MIXTRAL, work_, made))
    record = Simulation(plan, Options(keep_spans=True)).run().record
    decoding_s = sum(record.prefill_ns) / 1e9
    spans = [span for span in record.spans if span.name.startswith("expert.") and not span.waits_for and span.start >= decoding_s]
    computed, copied = ([span for span in spans if span.track == track] for track in (COMPUTE, EXPERTS))
    pairs = [(one, other) for one in computed for other in copied if one.name.split(".")[1] == other.name.split(".")[1]]
    beside = [one for one, other in pairs if one.start < other.end - 1e-9 and other.start < one.end - 1e-9]
    assert copied and len(computed) >= len(copied) and bool(beside) is not together


@pytest.mark.parametrize("missed", MissedExperts)
@pytest.mark.parametrize(("vram", "dram", "prefetch"), [(6, 8, 1), (6, 40, 4), (12, 40, 1), (30, 90, 4)])
def test_a_token_gets_its_experts_from_the_ssd_whatever_comes_ahead(vram: int, dram: int, prefetch: int, missed: MissedExperts) -> None:
    """Six of 32 experts a token, most of which are read. They come together: what comes ahead has none of their slots."""
    hardware, work_ = replace(with_host(20.0), vram_bytes=GB), work(new_tokens=8, prompt_tokens=16)
    many = replace(model(6, experts=32), model_type="mixtral")
    assert many.routers is not None
    many = replace(many, routers=replace(many.routers, top_k=6))
    slots = {"expert_vram_slots": vram, "expert_dram_slots": dram, "expert_prefetch": prefetch, "expert_least_chance": 0.1}
    made = search(hardware, many, work_, Force(**slots, expert_host=missed)).decisions
    plan = Plan(hardware, many, work_, made, predict(hardware, many, work_, made))
    record = Simulation(plan, Options(keep_spans=True)).run().record
    second_s = (sum(record.prefill_ns) + record.step_ns[0]) / 1e9  # the first step still has what the prompt had read ahead
    waits = [span for span in record.spans if span.track == COMPUTE and span.waits_for and span.name.startswith("expert.")]
    assert 0 < sum(wait.start >= second_s for wait in waits) <= 6 * len(record.step_ns[1:]), "one a visit"


def test_of_a_model_with_coded_experts_the_cpu_multiplies_by_these_alone() -> None:
    """What lies beside them in BF16, as routers do, is the card's: neither the bus of a simulation nor `explain` counts the CPU's BF16."""
    form = KNOWN_FORMATS["MXFP4"]
    coded = [
        replace(unit, format=form, stored_bytes=form.stored_bytes(1, unit.elements)) if unit.kind is UnitKind.expert else unit
        for unit in MIXTRAL.units
    ]
    m, host = (
        replace(MIXTRAL, units=tuple(coded)),
        HostRates(2, {"BF16": Curve(((1, 80.0),)), "MXFP4": Curve(((1, 20.0),))}, 2e-5, 1.0, 1.0),
    )
    hardware = replace(with_host(80.0), host=host, dram_bus_gbps=100.0)
    made = search(hardware, m, work(), Force()).decisions
    assert {unit.format.name for unit in m.of_kind(UnitKind.ffn)} == {"BF16"}
    assert bus_shares(hardware, m, made)[CPU] == pytest.approx(0.2) and products(m).of(hardware) == 20.0
    assert bus_shares(hardware, MIXTRAL, made)[CPU] == pytest.approx(0.8) and products(MIXTRAL).of(hardware) == 80.0


def test_an_expert_that_the_cpu_computes_spares_the_card_what_plans_say() -> None:
    """Kernels beside products, and what a step's launch takes, are no expert's."""
    hardware = with_host(60.0, layer_launch_s=1e-4)
    assert hardware.gpu is not None
    hardware = replace(hardware, vram_bytes=800 * MB, gpu=replace(hardware.gpu, layer_kernels_s=6e-5))
    made = search(hardware, MIXTRAL, work(), Force(resident_attn=8, resident_ffn=8, resident_head=2)).decisions
    plan = Plan(hardware, MIXTRAL, work(), made, predict(hardware, MIXTRAL, work(), made))
    step = next(found.each for found in passes_of(plan, tuple(unit for unit, _ in plan.placement.units), 1) if not found.each.prefill)
    assert is_recorded(hardware, plan.placement, made.kv)
    assert step.expert_ns / 1e9 == pytest.approx(expert_step_s(hardware, MIXTRAL, 1), rel=0.02)


def test_the_cpu_takes_a_share_where_that_is_faster() -> None:
    """What the program promises of it is what is predicted."""
    hardware, force = with_host(60.0), Force(expert_host=MissedExperts.copied)
    found, alone = (search(hardware, MIXTRAL, work(), one) for one in (Force(), force))
    told, told_alone = (predict(hardware, MIXTRAL, work(), one.decisions) for one in (found, alone))
    assert found.decisions.experts is not None and found.decisions.experts.host is MissedExperts.split
    assert told_alone.total_s - told.total_s == pytest.approx(alone.best_s - found.best_s, rel=0.02)
    assert told.decode_s_per_token < 0.8 * told_alone.decode_s_per_token and told.decode_stages["cpu"] > 0


def test_nothing_is_fetched_ahead_where_the_cpu_computes_what_is_missed() -> None:
    """A layer would wait for copies that have begun; unless routers that are asked beforehand name what is used."""
    hardware, ahead = with_host(60.0), dict[tuple[MissedExperts, float], int]()
    assert MIXTRAL.routers is not None
    for foreseen in (0.0, 0.5):
        m = replace(MIXTRAL, routers=replace(MIXTRAL.routers, foreseen=foreseen))
        for way in MissedExperts:
            found = search(hardware, m, work(), Force(expert_host=way)).decisions.experts
            assert found is not None
            ahead[way, foreseen] = found.prefetch
    assert ahead[MissedExperts.split, 0.0] == 0
    assert ahead[MissedExperts.copied, 0.0] and ahead[MissedExperts.split, 0.5]


@pytest.mark.parametrize(
    "hardware, changed, why",
    [
        (machine(vram=600 * MB, dram=4 * GB), {}, "not measured"),
        (machine(vram=0, dram=4 * GB), {}, "no GPU"),
        (with_host(60.0), {"model_type": "llama4_text"}, "does not compute this model's experts"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_its_reason(hardware: HardwareProfile, changed: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        search(hardware, replace(MIXTRAL, **changed), work(), Force(expert_host=MissedExperts.split))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("gbps", [0.5, 4.0, 12.0, 60.0])
def test_the_plans_own_way_is_within_three_percent_of_the_better_one(gbps: float, batch: int) -> None:
    """As both are simulated, by the runtime's own policies, with nothing fetched ahead; none where the CPU is slow."""
    hardware, work_ = with_host(gbps), work(batch=batch, requests=batch, new_tokens=48)
    took, own = {}, search(hardware, MIXTRAL, work_).decisions
    for way in MissedExperts:
        made = search(hardware, MIXTRAL, work_, Force(expert_host=way, expert_prefetch=0)).decisions
        steps = Simulation(Plan(hardware, MIXTRAL, work_, made, predict(hardware, MIXTRAL, work_, made))).run().record.step_ns
        took[way] = fmean(steps[8:])
    assert own.experts is not None and took[own.experts.host] <= 1.03 * min(took.values()), took
    assert gbps > 0.5 or own.experts.host is MissedExperts.copied
