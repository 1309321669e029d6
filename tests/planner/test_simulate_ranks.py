"""Plans of several ranks, acted out on one clock: what they promise is what their lanes and hops take, also of eight cards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.common.timeline.spans import COMPUTE, CPU, H2D, PASS, SSD
from penstock.planner.contract.decided.decisions import ExpertPolicyName, MissedExperts, ResidentForms, Tier
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.recording import can_record
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.formats import QUANTISED
from penstock.planner.contract.given.hardware import Card, HardwareProfile
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.links import Links
from penstock.planner.contract.given.model import Experts, ModelSpec, Routers
from penstock.planner.contract.given.network import Network
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.plan.schedules import ALONE, OWN, schedules_of
from penstock.planner.contract.policy.schedule_choice import Schedule
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.launches import is_recorded
from penstock.planner.contract.prices.missed_experts import host_split
from penstock.planner.contract.prices.price import Price, Resource
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.ranks.rank_model import model_of_rank
from penstock.planner.contract.ranks.rank_share import share_of_rank
from penstock.planner.contract.serving.serving_forecast import forecast_of
from penstock.planner.simulate.acted import Acted, Options
from penstock.planner.simulate.lanes.lanes import Clock, Lanes, Work
from penstock.planner.simulate.ranks.ranks_act import RanksSimulation
from penstock.planner.simulate.routers import DrawnRouters
from penstock.planner.solver.layer_counts import with_counts
from penstock.planner.solver.program import _minimised, _problems
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.solver.share_choice import share_of
from penstock.planner.solver.terms.bound import bound_s
from penstock.planner.solver.terms.problem import Question
from tests.cli import command, refusal
from tests.planner.small import GB, MB, gpu, model, work
from tests.planner.test_ranks import host

LINKS = Links(Curve(((1, 55.0), (2, 107.0), (4, 174.0), (8, 340.0))), 7e-5, 392.0)
CARDS = {"cards": 8, "links": LINKS, "dram_bus_gbps": 400.0}
WORDS = {"cards": 8, "links": replace(LINKS, word_hop_s=1.5e-5), "dram_bus_gbps": 400.0, "gpu": gpu(layer_kernels_s=1e-5)}
"""Cards that record steps, and their hops."""
CASES = {
    "eight links": (8, host(vram=700 * MB, **CARDS), model(layers=24), work(requests=3)),
    "eight cards, prompts in parts": (8, host(vram=2 * GB, **CARDS), model(layers=27), work(prompt_tokens=8192)),
    "as many parts as ranks": (
        4,
        host(vram=40 * GB, **CARDS | {"layer_launch_s": 2e-3}),
        model(layers=24),
        work(prompt_tokens=8192),
    ),
    "all resident": (3, host(vram=40 * GB, **CARDS), model(layers=25), work(prompt_tokens=8192, new_tokens=8)),
    "experts": (2, host(vram=3 * GB, **CARDS), model(layers=16, experts=8), work(new_tokens=16)),
    "recorded, all resident": (3, host(vram=40 * GB, **WORDS), model(layers=25), work(new_tokens=32)),
    "no cards": (2, host(vram=0), model(layers=24), work(prompt_tokens=512)),
    "two hosts": (4, host(vram=2 * GB, **CARDS | {"cards": 2, "hosts": 2, "network": Network(1.25, 1e-4)}), model(), work(requests=3)),
}


SPILLS = {
    "half of it in DRAM": (2, host(vram=900 * MB, **CARDS), {"prompt_tokens": 4096, "new_tokens": 64, "batch": 8}, Tier.dram),
    "four cards": (4, host(vram=2 * GB, **CARDS), {"prompt_tokens": 8192, "new_tokens": 16, "batch": 32}, Tier.dram),
    "beside layers of the drive": (
        2,
        host(vram=900 * MB, dram_bytes=2900 * MB, **CARDS),
        {"prompt_tokens": 4096, "new_tokens": 24, "batch": 8},
        Tier.dram,
    ),
    "on the drive": (2, host(vram=0, dram_bytes=4 * GB), {"prompt_tokens": 2048, "new_tokens": 16, "batch": 32}, Tier.ssd),
}


LONG, FEW = {"prompt_tokens": 8192, "new_tokens": 8}, {"prompt_tokens": 2048, "new_tokens": 8}
UNEVEN = {
    "streamed": ((16, 8), host(vram=700 * MB, **CARDS), work(requests=3)),
    "resident, a long prompt": ((16, 8), host(vram=40 * GB, **CARDS), work(**LONG)),
    "most on one": ((20, 4), host(vram=40 * GB, **CARDS), work(**LONG)),
    "three ranks": ((5, 12, 7), host(vram=40 * GB, **CARDS), work(**FEW)),
    "four ranks": ((2, 9, 3, 10), host(vram=40 * GB, **CARDS), work(**LONG)),
    "no cards": ((16, 8), host(vram=0), work()),
}


KERNELS = {"gpu": gpu(layer_kernels_s=3e-4), "layer_launch_s": 3e-4}
"""Of a layer as long as launching it."""
LAUNCHED = {
    "two ranks": ((12, 12), work(new_tokens=32)),
    "four ranks": ((6, 6, 6, 6), work(new_tokens=32)),
    "more layers of one rank": ((16, 8), work(new_tokens=32)),
    "a short prompt": ((8, 8, 8), work(prompt_tokens=128, new_tokens=8)),
    "a long prompt in parts": ((6, 6, 6, 6), work(**LONG)),
}


def as_promised(plan: Plan, prompt: float, step: float) -> tuple[Acted, ...]:
    """What came of each rank; prompts and steps take what ``plan`` promises, but for these shares."""
    acted = RanksSimulation(plan, Options()).run()
    record, promised = acted[0].record, plan.prediction
    assert fmean(record.prefill_ns) / 1e9 == pytest.approx(promised.ttft_s, rel=prompt)
    assert fmean(record.step_ns) / 1e9 == pytest.approx(promised.decode_s_per_token, rel=step)
    return acted


@pytest.mark.parametrize(("counts", "hardware", "asked"), UNEVEN.values(), ids=UNEVEN)
def test_unlike_numbers_of_layers_take_what_they_wait_for_each_other(counts, hardware, asked) -> None:
    as_promised(answer_dealt(Question(hardware, model(layers=24), asked, ranks=len(counts), layers=counts)), 0.03, 0.03)


@pytest.mark.parametrize(("count", "hardware", "whole", "asked"), CASES.values(), ids=CASES)
def test_a_plan_of_ranks_takes_as_long_as_its_lanes_and_hops(count, hardware, whole, asked) -> None:
    plan = answer_dealt(Question(hardware, whole, asked, ranks=count))
    acted = as_promised(plan, 0.04, 0.02)
    record, promised = acted[0].record, plan.prediction
    assert len(acted) == count and sum(one.plan.model.layers for one in acted) == whole.layers
    steps = len(record.step_ns)
    copied = sum(one.record.counts[f"decode {H2D} bytes"] for one in acted) / steps
    assert copied == pytest.approx(promised.h2d_bytes_per_token, rel=0.02)
    every = RanksSimulation(plan, Options(skip=False)).run() if count < 4 else acted
    assert [one.total_ns for one in every] == [one.total_ns for one in acted], "passes that come again are counted as they are"


@pytest.mark.parametrize(("count", "hardware", "asked", "tier"), SPILLS.values(), ids=SPILLS)
def test_each_rank_brings_the_kv_of_its_layers(count: int, hardware: HardwareProfile, asked: dict[str, int], tier: Tier) -> None:
    """Once for all parts of a prompt. The CPU, which could compute units, does not where KV lies outside VRAM."""
    hardware = replace(hardware, host=HOST if hardware.gpu else None)
    plan = answer_dealt(Question(hardware, model(layers=24), work(**asked, kv_spill=True), ranks=count))
    acted = as_promised(plan, 0.03, 0.04)
    assert plan.decisions.kv.of(tier) > 0 and plan.decisions.prefill_part_tokens > 0
    assert not any(one.plan.placement.host_units for one in acted)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("count", [2, 4])
def test_the_cpu_computes_missed_experts_of_all_ranks_in_turn(count: int, batch: int) -> None:
    """The card of each rank is spared them in its own turn. Threads sleep meanwhile, so that each visit wakes them up."""
    routed = model(layers=16, ffn=2400 * MB, experts=64)
    whole = replace(routed, model_type="mixtral", routers=Routers(8, default_hit_rates(64, 8)))
    hardware = host(vram=4 * GB, dram_bytes=60 * GB, **WORDS | {"host": HOST})
    question = Question(hardware, whole, work(new_tokens=128, batch=batch), ranks=count)
    copied, split = (answer_dealt(replace(question, force=Force(expert_host=way))) for way in MissedExperts)
    assert split.prediction.decode_s_per_token < 0.95 * copied.prediction.decode_s_per_token
    acted = as_promised(split, 0.06, 0.06)
    assert all(one.computed_on_cpu for one in acted)
    for ranks, hop_s in ((count, HOST.attention_hop_s), (1, HOST.hop_s)):
        plan = answer_dealt(replace(question, force=Force(expert_host=MissedExperts.split), ranks=ranks)).of_rank(0)
        shared = host_split(plan.hardware, plan.model, plan.decisions.experts, batch)
        assert shared is not None and shared.hop_s == hop_s
    for vram in (1, 4, 16):
        asked = replace(question, hardware=host(vram=vram * GB, dram_bytes=60 * GB, **WORDS | {"host": HOST}))
        for problem in _problems(asked):
            assert bound_s(problem) <= _minimised(problem)[1] * (1 + 1e-6), "no plan is faster than its bound"
    both = replace(question, force=Force(expert_host=MissedExperts.split))
    with pytest.raises(UserError, match="allowed: copied, since slices of experts are computed by their cards"):
        answer_dealt(replace(both, share=ExpertShare.sliced))
    with pytest.raises(UserError, match=r"moe\.share=sliced: slices .* set moe\.share=whole, or leave moe\.host out"):
        share_of(ExpertShare.sliced, both)
    assert share_of(None, both)[0] is ExpertShare.whole


@pytest.mark.parametrize(("counts", "asked"), LAUNCHED.values(), ids=LAUNCHED)
def test_kernels_of_layers_follow_each_other_also_where_their_launches_are_hidden(counts: tuple[int, ...], asked: Workload) -> None:
    hardware, whole = host(vram=40 * GB, **CARDS | KERNELS), model(layers=24)
    question = Question(hardware, whole, asked, ranks=len(counts), layers=counts)
    plan = answer_dealt(question)
    as_promised(plan, 0.02, 0.02)
    none = answer_dealt(replace(question, hardware=replace(hardware, gpu=gpu())))
    added_s = plan.prediction.decode_s_per_token - none.prediction.decode_s_per_token
    assert added_s == pytest.approx(24 * 3e-4, rel=1e-3)
    more_s = plan.prediction.ttft_s - none.prediction.ttft_s
    assert more_s > 0.9 * added_s if asked.prompt_tokens == 128 else more_s >= 0, "what computing binds hides some"


@pytest.mark.parametrize("count", [2, 4])
def test_a_step_takes_as_long_launched_as_recorded_where_hops_do(count: int) -> None:
    """All in VRAM, and launches take no time: the card's kernels are the same."""
    links = replace(LINKS, hop_s=1e-3, p2p_gbps=0.0)
    launched = host(vram=40 * GB, **CARDS | KERNELS | {"links": links, "layer_launch_s": 1e-9})
    question = Question(launched, model(layers=24), work(), ranks=count)
    recorded = replace(question, hardware=replace(launched, links=replace(links, word_hop_s=1e-3)))
    seconds = [answer_dealt(asked).prediction.decode_s_per_token for asked in (question, recorded)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)


HOST = HostRates(12, {"BF16": Curve(((1, 100.0), (16, 60.0)))}, 1e-5, 0.75, 0.84, attention_hop_s=1e-4)
"""Of the CPU beside cards."""
HALVES = Force(vram_ffn_slots=0)
"""What links bring is not less for fewer slots, so the CPU has something to do."""
BESIDE = replace(model(layers=24, attn=80 * MB, ffn=240 * MB), ffn_activation="silu")


def with_cpu(rates: HostRates | None = HOST, **change: object) -> HardwareProfile:
    kernels = {"gpu": gpu(layer_kernels_s=6.2e-5), "layer_launch_s": 6e-4}
    return host(vram=900 * MB, **CARDS | kernels | {"host": rates} | change)


HOPS = {"launched": LINKS, "recorded": replace(LINKS, word_hop_s=1.5e-5)}


@pytest.mark.parametrize("hops", HOPS)
@pytest.mark.parametrize("bus", [130.0, 180.0, 220.0, 400.0])
@pytest.mark.parametrize("count", [2, 4])
def test_one_cpu_computes_units_of_all_ranks_in_turn(count: int, bus: float, hops: str) -> None:
    change = {"dram_bus_gbps": bus, "links": HOPS[hops]}
    plan = answer_dealt(Question(with_cpu(**change), BESIDE, work(new_tokens=24), HALVES, ranks=count))
    alone = answer_dealt(Question(with_cpu(None, **change), BESIDE, work(new_tokens=24), HALVES, ranks=count))
    acted = as_promised(plan, 0.06, 0.03)
    assert is_recorded(acted[0].plan.hardware, acted[0].plan.placement, acted[0].plan.decisions.kv) is (hops == "recorded")
    units = [one.plan.placement.host_units for one in acted]
    if (count, bus) == (4, 130.0):
        assert not any(units), "the bus is full without it"
        return
    assert len(set(map(len, units))) == 1 and all(units)
    assert plan.prediction.decode_s_per_token < 0.99 * alone.prediction.decode_s_per_token
    steps = len(acted[0].record.step_ns)
    for one, own in zip(acted, units, strict=True):
        assert one.record.counts[f"decode {CPU} bytes"] == steps * sum(map(one.plan.placement.unit_bytes, own))
        assert not one.record.counts[f"prefill {CPU} bytes"]
    copied = sum(one.record.counts[f"decode {H2D} bytes"] for one in acted) / steps
    assert copied == pytest.approx(plan.prediction.h2d_bytes_per_token, rel=0.05)


def test_a_cpu_that_computes_for_several_ranks_takes_as_much_from_the_chain_as_for_one() -> None:
    """A unit on each of four ranks: four units of the CPU's, and four less of the cards'."""
    beside, part = with_cpu(), model_of_rank(BESIDE, Dealing.even(4, 24), 1)
    share, unit = share_of_rank(beside, 4, 1), part.of_kind(UnitKind.ffn)[0]
    four, one = (Beside.of(share, of, 1, ResidentForms()).computed(unit) for of in (part, replace(part, dealt=None)))
    assert four.of(Resource.card) == pytest.approx(4 * one.of(Resource.card))
    assert four.of(Resource.cpu) == pytest.approx(4 * (unit.stored_bytes / 75e9 + 1e-4)), "beside copies, handed over by the interpreter"
    assert one.of(Resource.cpu) == pytest.approx(unit.stored_bytes / 100e9 + 1e-5)
    recorded = Beside.of(replace(share, links=HOPS["recorded"]), part, 1, ResidentForms()).computed(unit)
    assert recorded.of(Resource.card) == pytest.approx(four.of(Resource.card)) and not recorded.hands_over
    assert recorded.of(Resource.cpu) == pytest.approx(4 * (unit.stored_bytes / 75e9 + 1e-5)), "handed over by the step's graph"


@pytest.mark.parametrize("count", [2, 4])
def test_recorded_steps_wait_for_the_cpu_as_long_whatever_launching_takes(count: int) -> None:
    """A launched layer of 5 ms would bind: nobody launches one."""
    took = {}
    for hops in HOPS:
        for launch_s in (6e-4, 5e-3):
            machine = with_cpu(layer_launch_s=launch_s, links=HOPS[hops])
            plan = answer_dealt(Question(machine, BESIDE, work(new_tokens=24), Force(host_ffn=2), ranks=count))
            step_s = fmean(RanksSimulation(plan, Options()).run()[0].record.step_ns) / 1e9
            if hops == "recorded":
                assert step_s == pytest.approx(plan.prediction.decode_s_per_token, rel=0.03)
            took[hops, launch_s] = step_s
    assert took["recorded", 6e-4] == pytest.approx(took["recorded", 5e-3], rel=0.005)  # behind a prompt that took longer
    assert took["recorded", 5e-3] < 0.95 * took["launched", 5e-3]


def test_each_rank_streams_alone_by_one_prediction() -> None:
    """Rank 0 judges for all, also where it has no units itself."""
    question = Question(with_cpu(links=HOPS["recorded"]), BESIDE, work(new_tokens=24), ranks=4)
    plan, none = answer_dealt(replace(question, force=HALVES)), answer_dealt(replace(question, force=HALVES.but(host_ffn=0)))
    own, alone = schedules_of(plan)
    assert (own.name, alone.name, own.predicted_s) == (OWN, ALONE, plan.prediction.decode_s_per_token)
    assert alone.predicted_s == pytest.approx(none.prediction.decode_s_per_token)
    first = replace(plan.decisions, weights=replace(plan.decisions.weights, host=HostUnits()))
    assert len(schedules_of(replace(plan, decisions=first))) == 2
    assert schedules_of(none) == (Schedule(OWN, none.prediction.decode_s_per_token),)


def test_ranks_whose_units_the_cpu_does_not_compute_say_why() -> None:
    question = Question(with_cpu(None), BESIDE, work(new_tokens=8), ranks=2)
    plan = answer_dealt(question)
    assert not any(one.placement.host_units for one in plan.each_rank)
    with pytest.raises(UserError, match=r"force\.host_ffn=2 .*allowed: 0, since .*has no rates of the CPU beside the GPU"):
        answer_dealt(replace(question, force=Force(host_ffn=2)))


@pytest.mark.parametrize("hops", HOPS)
@pytest.mark.parametrize("counts", [(16, 8), (14, 10)])
def test_ranks_with_unlike_numbers_of_layers_have_the_cpu_compute_as_many_of_theirs(counts: tuple[int, ...], hops: str) -> None:
    """Each reckons with units of the others in proportion to layers."""
    question = Question(with_cpu(links=HOPS[hops]), BESIDE, work(new_tokens=24), ranks=2, layers=counts)
    plan, alone = answer_dealt(question), answer_dealt(replace(question, force=Force(host_ffn=0)))
    units = [len(one.placement.host_units) for one in plan.each_rank]
    assert units[0] > units[1] > 0
    as_promised(plan, 0.06, 0.03)
    assert alone.prediction.decode_s_per_token > 1.4 * plan.prediction.decode_s_per_token


@pytest.mark.parametrize("hops", HOPS)
@pytest.mark.parametrize(("vram", "step"), [(1, 0.06), (2, 0.11)])
def test_unlike_cards_share_the_cpu(vram: int, step: float, hops: str) -> None:
    """The second one has a third of the link, so that its few layers wait for each other."""
    usual = with_cpu(links=HOPS[hops])
    slow = replace(usual.gpu, h2d=Curve(tuple((size, rate / 3) for size, rate in usual.gpu.h2d.points)))
    hardware = replace(usual, others=(Card(1, vram * usual.vram_bytes, slow),), devices=(0, 1))
    plan = answer_dealt(with_counts(Question(hardware, BESIDE, work(new_tokens=24), ranks=2)))
    assert all(one.placement.host_units for one in plan.each_rank) and plan.dealing.counts[0] > plan.dealing.counts[1]
    as_promised(plan, 0.06, step)


def test_no_step_of_unlike_cards_is_recorded_where_one_has_not_timed_its_kernels() -> None:
    """What is recorded goes round all of them."""
    usual = with_cpu(links=HOPS["recorded"])
    hardware = replace(usual, others=(Card(1, usual.vram_bytes, replace(usual.gpu, layer_kernels_s=0.0)),), devices=(0, 1))
    plan = answer_dealt(with_counts(Question(hardware, BESIDE, work(new_tokens=24), ranks=2)))
    assert not any(can_record(one.hardware, one.model) for one in plan.each_rank)
    as_promised(plan, 0.06, 0.06)


@pytest.mark.parametrize("hops", HOPS)
@pytest.mark.parametrize(("count", "units"), [(2, 1), (2, 3), (4, 1), (2, 6), (4, 2)])
def test_units_of_the_cpu_leave_a_step_what_links_or_the_chain_take(count: int, units: int, hops: str) -> None:
    plan = answer_dealt(Question(with_cpu(links=HOPS[hops]), BESIDE, work(new_tokens=24), Force(host_ffn=units), ranks=count))
    as_promised(plan, 0.06, 0.03)
    layers = sorted(plan.dealing.of(rank)[unit.layer] for rank in range(count) for unit in plan.of_rank(rank).placement.host_units)
    gaps = [after - before for before, after in zip(layers, layers[1:], strict=False)]
    assert max(gaps) <= 2 * 24 / (count * units) + 1, "ranks have theirs in turn, so that no link waits for a row of them"


@pytest.mark.parametrize("launch_s", [1.3e-3, 2e-3])
@pytest.mark.parametrize("count", [2, 4])
def test_who_hands_a_unit_over_launches_nothing_meanwhile(count: int, launch_s: float) -> None:
    plan = answer_dealt(Question(with_cpu(layer_launch_s=launch_s), BESIDE, work(new_tokens=24), ranks=count))
    assert plan.placement.host_units
    as_promised(plan, 0.06, 0.05)
    share = plan.of_rank(1)
    unit = Beside.of(share.hardware, share.model, 1, ResidentForms()).computed(share.model.of_kind(UnitKind.ffn)[0])
    assert count * unit.handing == pytest.approx(unit.of(Resource.cpu)), "its own unit, and nobody else's"
    busy_s = count * unit.handing
    issued = (unit + Price({Resource.card: 1e-3 - unit.of(Resource.card)}, issued=busy_s)) * 3
    assert max(issued.least()) == pytest.approx(3 * (busy_s + max(unit.handing, 1e-3)))


def test_units_of_the_cpu_are_of_each_rank_and_can_be_fixed(tmp_path: Path) -> None:
    question = Question(with_cpu(), BESIDE, work(new_tokens=8), ranks=2)
    plan = answer_dealt(replace(question, force=Force(host_ffn=3)))
    assert [len(plan.of_rank(rank).placement.host_units) for rank in range(2)] == [3, 3]
    write_plan(plan, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == plan
    assert all(one.hardware.host == HOST for one in plan.each_rank), "one rank computes at a time, with all threads"


@pytest.mark.parametrize("count", [2, 4])
def test_a_recorded_step_of_ranks_takes_as_long_as_its_copies(count: int) -> None:
    """Launching 24 layers would take 2 ms each, all ranks at the same time."""
    hardware = host(vram=700 * MB, **WORDS | {"layer_launch_s": 2e-3})
    plan = answer_dealt(Question(hardware, model(layers=24), work(), ranks=count))
    record = RanksSimulation(plan, Options()).run()[0].record
    assert fmean(record.step_ns) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=0.02)
    assert plan.prediction.bottleneck_decode == H2D
    launched = answer_dealt(Question(replace(hardware, links=LINKS), model(layers=24), work(), ranks=count))
    assert plan.prediction.decode_s_per_token < 0.9 * launched.prediction.decode_s_per_token


EXPERTS = {
    "two cards": (2, 8 * GB, 84 * MB, 8, 352 * MB),
    "four cards": (4, 8 * GB, 84 * MB, 8, 352 * MB),
    "many experts": (4, 4 * GB, 84 * MB, 64, 25 * MB),
}
"""Ranks, VRAM, bytes of attention, experts and bytes of each. ``mix`` foresees drawn experts, and copies
ahead what plans do not count; ``lru`` does not."""
RECENT = Force(expert_policy=ExpertPolicyName.lru)


MANY = model(layers=16, attn=84 * MB, ffn=64 * 25 * MB, experts=64)


def routed(whole: ModelSpec, count: int, vram: int, asked: Workload, **card: object) -> tuple[float, float]:
    """Predicted over simulated, a prompt and a step."""
    hardware = host(vram=vram, dram=256 * GB, **CARDS | card)
    plan = answer_dealt(Question(hardware, whole, asked, RECENT, ranks=count))
    record = RanksSimulation(plan, Options()).run()[0].record
    predicted = plan.prediction
    return predicted.ttft_s / fmean(record.prefill_ns) * 1e9, predicted.decode_s_per_token / fmean(record.step_ns) * 1e9


@pytest.mark.parametrize(("layers", "launch_s"), [(9, 2e-4), (11, 1e-3)])
def test_ranks_with_one_layer_more_than_others_wait_for_as_many_as_there_are(layers: int, launch_s: float) -> None:
    """Of nine layers over four ranks three ranks have two, and one has three: they are not twelve."""
    whole = model(layers=layers, attn=84 * MB, ffn=64 * 25 * MB, experts=64)
    prompt, step = routed(whole, 4, 4 * GB, work(new_tokens=96), layer_launch_s=launch_s)
    assert prompt == pytest.approx(1, abs=0.04) and step == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("launch_s", [6e-4, 1e-3])
def test_ranks_record_what_lies_between_their_experts(launch_s: float, count: int) -> None:
    card = {"layer_launch_s": launch_s}
    prompt, step = routed(MANY, count, 6 * GB, work(new_tokens=64), **WORDS | card)
    assert prompt == pytest.approx(1, abs=0.03) and step == pytest.approx(1, abs=0.05)
    each = [{"gpu": gpu(layer_kernels_s=1e-5), "links": links} for links in (LINKS, WORDS["links"])]
    launched_s, recorded_s = (
        answer_dealt(Question(host(vram=6 * GB, dram=256 * GB, **CARDS | card | own), MANY, work(), RECENT, ranks=count)).prediction
        for own in each
    )
    assert recorded_s.decode_s_per_token < 0.9 * launched_s.decode_s_per_token


@pytest.mark.parametrize("launch_s", [6e-4, 1e-3])
def test_who_misses_few_experts_waits_for_none_while_the_host_launches(launch_s: float) -> None:
    prompt, step = routed(MANY, 2, 3 * GB, work(new_tokens=48), layer_launch_s=launch_s)
    assert prompt == pytest.approx(1, abs=0.03) and step == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("launch_s", [2e-4, 1e-3])
def test_a_long_prompts_attention_hides_behind_no_wait_for_experts(launch_s: float, coded: bool) -> None:
    """Neither where decoding experts takes as long as their products."""
    whole = MANY
    if coded:
        form = QUANTISED["MXFP4"]
        units = (replace(unit, format=form) if unit.kind is UnitKind.expert else unit for unit in MANY.units)
        whole = replace(MANY, units=tuple(units))
    prompt, _ = routed(whole, 4, 4 * GB, work(prompt_tokens=8192, new_tokens=4), layer_launch_s=launch_s)
    assert prompt == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("count", "vram", "attn", "experts", "size"), EXPERTS.values(), ids=EXPERTS)
def test_an_expert_that_one_rank_misses_comes_at_the_rate_of_a_link_alone(count, vram, attn, experts, size) -> None:
    whole = model(layers=16, attn=attn, ffn=experts * size, experts=experts)
    plan = answer_dealt(Question(host(vram=vram, dram=256 * GB, **CARDS), whole, work(requests=2, new_tokens=128), RECENT, ranks=count))
    acted = RanksSimulation(plan, Options()).run()
    steps = acted[0].record.step_ns
    assert fmean(steps) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=0.05)
    assert fmean(acted[0].record.prefill_ns) / 1e9 == pytest.approx(plan.prediction.ttft_s, rel=0.03)
    misses = [one.experts["vram"].misses for one in acted]
    assert len(set(misses)) > 1, "each rank's routers choose for themselves"


def test_a_prompt_waits_for_experts_whose_slots_are_full_while_launches_take_long() -> None:
    hardware = host(vram=4 * GB, dram=256 * GB, **CARDS)
    slow = replace(hardware, layer_launch_s=1.5e-3)
    whole = model(layers=16, attn=84 * MB, ffn=64 * 25 * MB, experts=64)
    took = []
    for machine in (hardware, slow):
        plan = answer_dealt(Question(machine, whole, work(new_tokens=8), ranks=4))
        acted = RanksSimulation(plan, Options()).run()
        took.append(fmean(acted[0].record.prefill_ns) / 1e9)
        assert took[-1] == pytest.approx(plan.prediction.ttft_s, rel=0.03)
    assert took[1] > 1.2 * took[0]


@pytest.mark.parametrize(("count", "top_k"), [(8, 2), (32, 4)])
def test_drawn_experts_are_found_as_often_as_the_curve_says(count: int, top_k: int) -> None:
    experts = Experts(count, top_k, MB, (0,), default_hit_rates(count, top_k))
    routers, latest, depths, steps = DrawnRouters(experts, ExpertPolicyName.lru, 3), [], [], 4000
    for _ in range(steps):
        chosen = routers.next(0, 1, 1, False).chosen[0].tolist()
        assert len(set(chosen)) == top_k
        depths += [latest.index(expert) for expert in chosen if expert in latest]
        latest = [*dict.fromkeys((*chosen, *latest))]
        assert set(latest[:top_k]) == set(chosen)
    for slots in (count // 4, count // 2, count - 1):
        found = sum(depth < slots for depth in depths) / steps / top_k
        assert found == pytest.approx(experts.hit_rates[slots], abs=0.02)


@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_ranks_of_a_host_share_what_it_has_and_those_of_others_do_not(here: int, there: int, drive: bool) -> None:
    together = {1: 1.0, 2: 0.9, 3: 0.7, 4: 0.6}
    clock, ends = Clock(lambda cards, alone_gbps: together[cards]), []
    track = SSD if drive else H2D
    for number, count in enumerate((here, there)):
        for _ in range(count):
            lanes = Lanes({}, {}, None, clock, number)
            lanes.add(track, Work((), "", 1, lambda: ends.append(clock.now)), 1000)
            lanes.add(COMPUTE, Work((), "", 1, lambda: None), 10**6)
    while clock.step():
        pass
    each = [1000 * count if drive else 1000 / together[count] for count in (here, there) for _ in range(count)]
    assert sorted(ends) == pytest.approx(sorted(each), rel=1e-2) and clock.now == 10**6


def test_simulate_tells_of_each_rank(tmp_path: Path) -> None:
    plan = answer_dealt(Question(host(vram=700 * MB), model(layers=23), work(), HALVES, ranks=2))
    write_plan(plan, tmp_path / "two.yaml")
    done = command("planner", "simulate", "plan=two.yaml", "trace=two.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = json.loads((tmp_path / "two.json").read_text())["traceEvents"]
    copied = [sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == H2D and e["pid"] == pid) for pid in (1, 2)]
    passes = [e for e in events if e["ph"] == "X" and e["cat"] == PASS]
    assert [e["name"] for e in passes] == ["prefill", *(f"decode {k}" for k in range(1, len(passes)))] and {e["pid"] for e in passes} == {1}
    assert min(copied) > 0.9 * sum(e["dur"] for e in passes)
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["ratio"]["decode_s_per_token"] == pytest.approx(1, abs=0.02)
    assert [row["rank"] for row in told["ranks"]] == [0, 1] and all(row["busy"]["decode"][H2D] > 0.9 for row in told["ranks"])
    assert told["simulated"]["h2d_bytes_per_token"] == pytest.approx(plan.prediction.h2d_bytes_per_token, rel=0.02)
    said = refusal("planner", "simulate", "plan=two.yaml", "force.vram_slots=6", cwd=tmp_path)
    assert "is for 2 ranks, and `planner simulate` with force works on one alone yet" in said


def test_a_server_over_ranks_is_played_as_its_plan_foresees(tmp_path: Path) -> None:
    served = work(batch=4, clients=4, prompt_tokens=64, new_tokens=32, context_tokens=512, requests=64)
    plan = answer_dealt(Question(host(vram=700 * MB), model(layers=22), served, HALVES, ranks=2))
    write_plan(plan, tmp_path / "served.yaml")
    done = command("planner", "simulate", "plan=served.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    asked, foreseen = json.loads(done.stdout.strip().splitlines()[-1])["asked"], forecast_of(plan)
    assert asked["tokens_per_s"] == pytest.approx(foreseen.tokens_per_s, rel=0.05)
