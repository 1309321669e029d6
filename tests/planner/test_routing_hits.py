"""The curve of hits from a routings, and what two tiers keep of it together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.config.config_schema import ForceConfig, MoeConfig
from penstock.planner.contract.decided.decisions import ExpertPolicyName, ExpertSlots
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import expert_caches
from penstock.planner.contract.experts.expert_hits import default_hit_rates, flaw
from penstock.planner.contract.experts.expert_misses import misses
from penstock.planner.contract.experts.policies import make_expert_policy
from penstock.planner.contract.given.model import SECOND_TIER
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.replay.routing_hits import RoutedModel, with_hits
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.routers import RecordedRouters
from penstock.planner.solver.program import solve
from tests.planner.small import GB, machine, model, work
from tests.planner.test_checkpoint import SHARED

replay = pytest.importorskip("penstock.planner.replay.replayed")
two_tiers = pytest.importorskip("penstock.planner.replay.two_tiers")
RECORDED = SHARED.parent / "traces" / "tiny-mixtral.jsonl.xz"


def routing_file(directory: Path, choices: list[list[int]], phase: str = "decode", layers: int = 2) -> str:
    """Tokens that use the same experts in each layer."""
    path = directory / "routings.jsonl"
    rows = [{"prompt": 0, "phase": phase, "pos": i, "experts": [chosen] * layers} for i, chosen in enumerate(choices)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_without_routings_the_known_figures_of_the_policy_stand():
    known = with_hits(model(experts=8), MoeConfig(policy=ExpertPolicyName.lru))
    assert known.model.experts.hit_rates == default_hit_rates(8, 2, ExpertPolicyName.lru) and known.source is None
    assert known.model.experts.second_tier == SECOND_TIER == 0.75
    assert known.in_slots(ExpertSlots(10, 20)) == known.model
    assert with_hits(model(), MoeConfig()) == RoutedModel(model())


def test_routings_give_the_curve_and_the_plan_follows_it(tmp_path):
    """Tokens that use the same two experts find them all in two slots; those that take turns do not."""
    hardware, same, turns = machine(vram=GB), [[0, 1]] * 60, [[i % 8, (i + 1) % 8] for i in range(0, 120, 2)]
    steps = []
    for choices in (same, turns):
        routed = with_hits(model(experts=8), MoeConfig(routings=routing_file(tmp_path, choices)))
        m = routed.model
        assert not flaw(m.experts.hit_rates, 8) and routed.source == "mix on routings.jsonl"
        steps.append(predict(hardware, m, work(), solve(hardware, m, work())).decode_s_per_token)
    assert steps[0] < steps[1]


@pytest.mark.parametrize("phase, choices, policy, says", [
    ("decode", [[0, 1, 2]] * 3, None, "use 3 experts a layer, those of small 2"),
    ("decode", [[0, 8]] * 3, None, r"^moe\.routings=.*routings\.jsonl"),
    ("prefill", [[0, 1]] * 3, None, "no decode steps"),
    ("decode", [[0, 1]] * 3, ExpertPolicyName.lookahead, "moe.policy=lookahead: .* has no scores"),
])  # fmt: skip
def test_routings_that_do_not_suit_are_refused_in_one_line(phase, choices, policy, says, tmp_path):
    with pytest.raises(UserError, match=says) as refused:
        with_hits(model(experts=8), MoeConfig(routings=routing_file(tmp_path, choices, phase), policy=policy))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("layers, foreseen", [(4, True), (2, False)])
def test_routings_tell_what_routers_foresee_where_farther_ones_are_asked(layers, foreseen, tmp_path):
    """Routers that are always right when asked a layer before; of two layers there is none farther than the next."""
    draw, path, rows = Random(0), tmp_path / "scored.jsonl", []
    for i in range(80):
        experts = [draw.sample(range(8), 2) for _ in range(layers)]
        ahead = [[0.4 if e in chosen else 0.03 for e in range(8)] for chosen in experts[1:]]
        rows.append({"prompt": 0, "phase": "decode", "pos": i, "experts": experts, "ahead": ahead})
    path.write_text("\n".join(map(json.dumps, rows)))
    m = model(layers, experts=8)
    told = {
        (policy, prefetch): with_hits(m, MoeConfig(routings=str(path), policy=policy, prefetch=prefetch)).model.experts.foreseen
        for policy in (ExpertPolicyName.lookahead, ExpertPolicyName.mix)
        for prefetch in (None, 0)
    }
    assert (told.pop((ExpertPolicyName.lookahead, None)) > 0.5) == foreseen
    assert set(told.values()) == {0.0}


def test_the_chance_from_which_experts_are_fetched_is_the_plans_own(tmp_path):
    """Routers foresee less with a higher one, and the caches that simulator and engine ask fetch less."""
    draw, path, rows = Random(0), tmp_path / "scored.jsonl", []
    for i in range(80):
        experts = [draw.sample(range(8), 2) for _ in range(4)]
        guessed = [chosen if draw.random() < 0.7 else draw.sample(range(8), 2) for chosen in experts]
        ahead = [[0.4 if e in chosen else 0.03 for e in range(8)] for chosen in guessed[1:]]
        rows.append({"prompt": 0, "phase": "decode", "pos": i, "experts": experts, "ahead": ahead})
    path.write_text("\n".join(map(json.dumps, rows)))
    foreseen, fetched = {}, {}
    for chance in (0.0, None, 0.99):
        moe = MoeConfig(routings=str(path), policy=ExpertPolicyName.lookahead, prefetch=2, least_chance=chance)
        m = with_hits(model(4, experts=8), moe).model
        foreseen[chance] = m.experts.foreseen
        made = solve(machine(vram=GB, dram=4 * GB), m, work(), Force.from_config(ForceConfig(expert_dram_slots=12), moe)).experts
        assert made.least_chance == (0.5 if chance is None else chance)
        _, cache = expert_caches(m.experts, replace(made, policy=ExpertPolicyName.mix, vram_slots=0), gpu=False)
        for row in rows[:40]:
            for layer, wanted in enumerate(row["experts"]):
                cache.find(layer, wanted)
                cache.judge(layer, Routing(np.array([wanted]), False))
                fetched[chance] = fetched.get(chance, 0) + len(list(cache.coming(layer, 2)))
    assert foreseen[0.0] >= foreseen[None] > foreseen[0.99] == 0
    assert fetched[0.0] > fetched[None] >= fetched[0.99]


def test_a_dense_model_has_no_use_for_routings(tmp_path):
    with pytest.raises(UserError, match="small has no routed experts"):
        with_hits(model(), MoeConfig(routings=routing_file(tmp_path, [[0, 1]])))


@pytest.mark.skipif(not RECORDED.exists(), reason="needs the shared routings")
@pytest.mark.parametrize("in_vram, in_dram", [(1, 3), (2, 2), (2, 4), (3, 3), (4, 2), (2, 5)])
def test_a_slot_of_the_smaller_tier_counts_for_as_much_as_plans_say(in_vram, in_dram):
    routings = part_of_the_shared_routings(1500)
    one = replay.hit_curve(routings, ExpertPolicyName.mix)
    slots = max(in_vram, in_dram) + SECOND_TIER * min(in_vram, in_dram)
    expected, larger, both = (1 - np.interp(n, range(9), one) for n in (slots, max(in_vram, in_dram), in_vram + in_dram))
    missed = two_tiers.missed_by_both(model(6, experts=8).experts, ExpertSlots(6 * in_vram + 3, 6 * in_dram + 3), routings)
    assert both < missed < larger and missed <= expected + 0.01


def weight(directory: Path, choices: list[list[int]], policy: ExpertPolicyName, experts: int = 8) -> float:
    routed = with_hits(model(experts=experts), MoeConfig(routings=routing_file(directory, choices), policy=policy))
    return routed.model.experts.second_tier


def test_routings_tell_what_a_second_tier_adds(tmp_path):
    """Lasting favourites: what is used often stays in one tier or the other. Where experts take turns LRU's tiers let each go just before
    it is due. Where one tier has room for all nothing can be told."""
    draw, odds = np.random.default_rng(0), np.array([40, 30, 20, 12, 8, 5, 3, 2]) / 120
    favourites = [draw.choice(8, 2, replace=False, p=odds).tolist() for _ in range(600)]
    assert 0.6 < weight(tmp_path, favourites, ExpertPolicyName.lfu) <= 1
    assert weight(tmp_path, [[i % 8, (i + 1) % 8] for i in range(0, 400, 2)], ExpertPolicyName.lru) == 0
    assert weight(tmp_path, [[0, 1]] * 20, ExpertPolicyName.mix, experts=2) == SECOND_TIER


def test_of_long_routings_the_beginning_tells_beside_its_own_curve(tmp_path, monkeypatch):
    draw = np.random.default_rng(1)
    choices = [draw.choice(8, 2, replace=False, p=np.arange(1, 9) / 36).tolist() for _ in range(300)]
    beginning = weight(tmp_path, choices[:100], ExpertPolicyName.mix)
    monkeypatch.setattr(two_tiers, "MOST_USES", 100 * 2 * 2)
    assert weight(tmp_path, choices[:100] + [[0, 1]] * 200, ExpertPolicyName.mix) == beginning


def part_of_the_shared_routings(tokens: int):
    from penstock.planner.contract.experts.routing_files import read_routings

    whole = read_routings(RECORDED)
    return replace(whole, experts=whole.experts[:tokens], prompt=whole.prompt[:tokens], decode=whole.decode[:tokens])


@pytest.mark.skipif(not RECORDED.exists(), reason="needs the shared routings")
@pytest.mark.parametrize("policy", [ExpertPolicyName.mix, ExpertPolicyName.lru, ExpertPolicyName.lfu])
def test_the_measured_weight_predicts_other_splits_no_worse_than_the_default(policy):
    """Better by a quarter where the policy is not the one that the default was taken from."""
    routings, m = part_of_the_shared_routings(3000), model(6, experts=8)
    experts = replace(m.experts, hit_rates=replay.hit_curve(routings, policy))
    measured = replace(experts, second_tier=two_tiers.second_tier(experts, routings, policy), alone=1.0)
    errors = {experts: 0.0, measured: 0.0}
    for in_vram, in_dram in ((1, 3), (2, 3), (3, 3), (3, 4), (4, 3), (2, 5), (5, 1)):
        slots = ExpertSlots(6 * in_vram + 3, 6 * in_dram + 3, policy)
        missed = two_tiers.missed_by_both(experts, slots, routings)
        for known in errors:
            errors[known] += abs(misses(replace(m, routers=known.routers), slots, 1, True).dram / (6 * 2) - missed) / 7
    assert errors[measured] <= (errors[experts] + 0.001 if policy is ExpertPolicyName.mix else 0.75 * errors[experts])


@pytest.mark.parametrize("policy", [ExpertPolicyName.mix, ExpertPolicyName.lfu])
def test_a_plan_misses_what_its_own_slots_miss_in_the_routings(policy, tmp_path):
    """By the curve, with the weight as acted out in them: 1 at most, which two tiers of these routings exceed by a little."""
    draw, odds = np.random.default_rng(2), np.array([40, 30, 20, 12, 8, 5, 3, 2]) / 120
    path, rows = tmp_path / "layers.jsonl", []
    for i in range(300):
        experts = [draw.choice(8, 2, replace=False, p=odds).tolist() for _ in range(4)]
        rows.append({"prompt": 0, "phase": "decode", "pos": i, "experts": experts})
    path.write_text("\n".join(map(json.dumps, rows)))
    routed = with_hits(model(4, experts=8), MoeConfig(routings=str(path), policy=policy))
    for vram, dram in ((11, 15), (14, 9), (7, 19)):
        slots = ExpertSlots(vram, dram, policy)
        missed = two_tiers.missed_by_both(routed.model.experts, slots, routed.routings)
        assert misses(routed.in_slots(slots), slots, 1, True).dram / (4 * 2) == pytest.approx(missed, abs=0.008)
    for vram, dram in ((32, 0), (3, 12), (12, 32)):
        assert routed.in_slots(ExpertSlots(vram, dram, policy)) == routed.model


@pytest.mark.skipif(not RECORDED.exists(), reason="needs the shared routings")
@pytest.mark.parametrize("in_vram, in_dram", [(2, 4), (4, 2), (3, 3)])
def test_both_tiers_miss_what_the_simulated_engine_reads(in_vram, in_dram):
    """Nothing fetched ahead, by a host that takes no time to ask: reads that begin later come in another order. A prompt of one token
    counts as a step."""
    shared = part_of_the_shared_routings(500)
    steps = replace(shared, experts=shared.experts[shared.decode], prompt=shared.prompt[shared.decode], decode=shared.decode[shared.decode])
    hardware, m, w = machine(layer_launch_s=0.0), model(6, experts=8), work(prompt_tokens=1, new_tokens=len(steps.decode) + 1)
    made = replace(solve(hardware, m, w), experts=ExpertSlots(6 * in_vram + 3, 6 * in_dram + 3))
    plan = Plan(hardware, m, w, made, predict(hardware, m, w, made))
    found = Simulation(plan, routers=RecordedRouters(steps, None)).run().experts["dram"]
    twice = np.r_[0, : len(steps.decode)]
    acted = replace(steps, experts=steps.experts[twice], prompt=steps.prompt[twice], decode=steps.decode[twice])
    missed = two_tiers.missed_by_both(m.experts, made.experts, acted)
    assert found.misses == pytest.approx(missed * acted.experts.size, abs=0.1) and found.misses > 50


@pytest.mark.parametrize("seed", range(30))
def test_what_stays_does_not_depend_on_the_order_of_use(seed: int) -> None:
    """And nothing gives its slot before it was used."""
    random = Random(seed)
    visits = [random.sample(range(8), random.randint(2, 8)) for _ in range(20)]
    ends = []
    for order in (seed, seed + 1000):
        shuffled, policy = Random(order), make_expert_policy(ExpertPolicyName.mix, 1, 8, 2)
        cache = ExpertCache({0: 3}, 3 + 8, 8, policy)
        for wanted in visits:
            seen = cache.find(0, wanted)
            for expert in seen.misses:
                cache.take(0, expert)
            place = {expert: cache.slot(0, expert) for expert in wanted}
            cache.judge(0, Routing(np.array([wanted]), False))
            to_use = shuffled.sample(wanted, len(wanted))
            while to_use:
                expert = to_use.pop()
                for slot in cache.settle(0, expert):
                    assert slot not in {place[e] for e in to_use}, "still to be used"
                    cache.give_back(slot)
            assert cache.free == 11 - sum(cache.keeps(0, e) for e in range(8)), "none is lost"
        ends.append([expert for expert in range(8) if cache.keeps(0, expert)])
    assert ends[0] == ends[1] and len(ends[0]) == 3
