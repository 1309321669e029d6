"""Routings acted out: every number of slots in one pass, Belady's bound, prefetching, curves."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.routing import Size, made_up_routings
from penstock.planner.contract.decided.decisions import ExpertPolicyName, ExpertSlots
from penstock.planner.contract.experts.expert_cache import Routing
from penstock.planner.contract.experts.expert_caches import expert_caches, keep_first
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.experts.policies import make_expert_policy
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.contract.given.model import Experts
from penstock.planner.replay.comparison import BELADY, compare
from penstock.planner.replay.replayed import hit_curve, passes, replay, replay_belady
from penstock.planner.replay.two_tiers import settle

FED = [name for name in ExpertPolicyName if make_expert_policy(name, 1, 2, 1).needs_ahead is None]


def made(experts: list[list[list[int]]], count: int, decode: list[bool] | None = None) -> Routings:
    """[tokens][layers][top_k] of one prompt."""
    return Routings(
        np.array(experts, np.int16),
        np.zeros(len(experts), np.int64),
        np.array(decode or [True] * len(experts)),
        count,
    )


@st.composite
def drawn_routings(draw: Callable[..., object], most_tokens: int = 25, most_count: int = 6) -> Routings:
    layers, count = draw(st.integers(1, 3)), draw(st.integers(2, most_count))
    top_k, tokens, seed = draw(st.integers(1, min(3, count))), draw(st.integers(1, most_tokens)), draw(st.integers(0, 10**6))
    random = np.random.default_rng(seed)
    favour = random.gumbel(size=(layers, count)) * draw(st.sampled_from([0.0, 1.0, 3.0]))
    noise = random.gumbel(size=(tokens, layers, count))
    experts = np.argsort(-(favour + noise), axis=2)[..., :top_k].astype(np.int16)
    decode = random.random(tokens) < draw(st.sampled_from([0.5, 1.0]))
    decode[-1] = True
    return Routings(experts, np.zeros(tokens, np.int64), decode, count)


def kept_one_number_at_a_time(routings: Routings, name: ExpertPolicyName, slots: int) -> int:
    """Hits by the rule itself: keep the most worthy of what was held and what was used, at first of a layer's first experts."""
    policy = make_expert_policy(name, routings.layers, routings.count, routings.top_k)
    held = [set(range(slots)) for _ in range(routings.layers)]
    hits = 0
    for token in routings.experts.tolist():
        for layer, experts in enumerate(token):
            hits += len(held[layer] & set(experts))
            policy.observe(layer, experts)
            worth = policy.worth(layer)
            held[layer] = set(sorted(held[layer] | set(experts), key=lambda e, worth=worth: (-worth[e], e))[:slots])
    return hits


def best_possible(routings: Routings, slots: int) -> int:
    """The most hits over all choices of what to keep at first and after each visit, be it a step's or a prompt's, whose own finds do not
    count; one layer after the other."""
    total = 0
    for layer in range(routings.layers):
        found = {frozenset(kept): 0 for kept in combinations(range(routings.count), slots)}
        for first, end in passes(routings):
            used = frozenset(routings.experts[first:end, layer].ravel().tolist())
            after: dict[frozenset[int], int] = {}
            for held, hits in found.items():
                candidates = held | used
                now = hits + (len(held & used) if routings.decode[first] else 0)
                for kept in combinations(sorted(candidates), min(slots, len(candidates))):
                    after[frozenset(kept)] = max(after.get(frozenset(kept), 0), now)
            found = after
        total += max(found.values())
    return total


@settings(max_examples=40, deadline=None)
@given(drawn_routings(), st.sampled_from(FED))
def test_one_pass_finds_what_each_number_of_slots_finds_alone(routings: Routings, name: ExpertPolicyName) -> None:
    routings = routings.all_decoded()
    hits = replay(routings, name).kept.hits
    assert list(hits) == [kept_one_number_at_a_time(routings, name, n) for n in range(routings.count + 1)]


@settings(max_examples=40, deadline=None)
@given(drawn_routings(), st.sampled_from(FED))
def test_a_run_finds_in_vram_what_the_replay_says(routings: Routings, name: ExpertPolicyName) -> None:
    """By the caches of a run whose DRAM has all experts; prompts pass through the slots."""
    hits = replay(routings, name).kept.hits
    experts = Experts(routings.count, routings.top_k, 1, tuple(range(routings.layers)), default_hit_rates(routings.count, routings.top_k))
    for slots in range(1, routings.count):
        if (in_all := slots * routings.layers + fewest_slots(experts)) >= experts.units:
            break  # every expert has a slot
        vram, dram = expert_caches(experts, ExpertSlots(in_all, experts.units, name), gpu=True)
        assert vram is not None
        keep_first(experts, vram, dram)
        found = 0
        for first, end in passes(routings):
            for layer, chosen in enumerate(routings.experts[first:end].swapaxes(0, 1).astype(np.intp)):
                routing = Routing(chosen, prompt=not routings.decode[first])
                near = vram.find(layer, routing.experts)
                vram.judge(layer, routing)
                found += 0 if routing.prompt else len(near.hits)
                for expert in near.hits:
                    settle(vram, layer, expert)
                for expert in near.misses:
                    vram.take(layer, expert)
                    settle(vram, layer, expert)
        assert found == hits[slots]


@settings(max_examples=40, deadline=None)
@given(drawn_routings(most_tokens=9, most_count=5))
def test_belady_is_the_best_of_all_choices(routings: Routings) -> None:
    assert list(replay_belady(routings).hits) == [best_possible(routings, n) for n in range(routings.count + 1)]


BETWEEN = made(
    [[[0, 1], [0, 1]], [[0, 2], [2, 0]], [[0, 1], [2, 1]], [[0, 3], [2, 0]], [[0, 3], [0, 1]], [[0, 3], [2, 1]], [[0, 3], [2, 3]]],
    count=4,
    decode=[True, True, False, False, False, True, True],
)
"""A prompt between steps leaves experts that a later step uses."""


@settings(max_examples=40, deadline=None)
@given(drawn_routings(), st.sampled_from(FED))
@example(BETWEEN, ExpertPolicyName.lru)
def test_no_policy_beats_belady(routings: Routings, name: ExpertPolicyName) -> None:
    bound = replay_belady(routings).hits
    assert all(hits <= most for hits, most in zip(replay(routings, name).kept.hits, bound, strict=True))


@settings(max_examples=30, deadline=None)
@given(drawn_routings(), st.sampled_from(FED))
def test_a_curve_is_concave_from_nothing_to_everything_and_nowhere_below_the_replay(routings: Routings, name: ExpertPolicyName) -> None:
    curve, kept = hit_curve(routings, name), replay(routings, name).kept
    steps = np.diff(curve)
    assert curve[0] == 0 and curve[-1] == 1 and len(curve) == routings.count + 1
    assert (steps >= -1e-12).all() and (np.diff(steps) <= 1e-12).all()
    assert all(point >= kept.rate(n) - 1e-12 for n, point in enumerate(curve))


def test_prompts_are_studied_and_not_scored() -> None:
    experts = [[[0, 1]], [[0, 1]], [[2, 3]], [[2, 3]]]
    routings = made(experts, 4, [False, False, True, True])
    assert replay(routings, ExpertPolicyName.lru).kept.uses == 4
    assert replay(routings, ExpertPolicyName.lru).kept.hits == (0, 1, 2, 3, 4), "a start filled what a prompt left alone"
    assert replay(routings, ExpertPolicyName.static).kept.hits[2] == 0, "it keeps what the prompt used"
    assert replay(routings.all_decoded(), ExpertPolicyName.lru).kept.hits[2] == 6


def test_a_prefetch_counts_what_was_not_held() -> None:
    routings = made([[[0], [0]], [[1], [1]]] * 50, 4)
    found = replay(routings, ExpertPolicyName.markov, slots=(1,), prefetch=Prefetch(1)).fetched[0]
    assert 90 < found.missed < 110 and found.right > 0.9 * found.missed and found.fetched <= 200
    assert replay(routings, ExpertPolicyName.markov, slots=(1,), prefetch=Prefetch(1, least_chance=0.999)).fetched[0].fetched == 0
    assert replay(routings, ExpertPolicyName.lru, slots=(1,), prefetch=Prefetch(1)).fetched == ()


def test_a_cycle_shows_what_lru_loses() -> None:
    routings = made([[[t % 3]] for t in range(300)], 3)
    scores = {(s.policy, s.slots): s for s in compare(routings, [ExpertPolicyName.mix], [2], Prefetch(1)).scores()}
    assert scores["lru", 2].hit_rate == 2 / 300 and scores["lru", 2].regret == 1, "the two that it began with"
    assert scores[BELADY, 2].hit_rate == pytest.approx(2 / 3, abs=0.02)
    assert scores["mix", 2].ready_rate > 0.8


@pytest.fixture(scope="module")
def made_up() -> Routings:
    return made_up_routings(Size(prompts=6, prompt_tokens=32, new_tokens=96), seed=0)


def test_the_made_up_routings_have_mixtrals_locality(made_up: Routings) -> None:
    lru, bound = replay(made_up, ExpertPolicyName.lru).kept, replay_belady(made_up)
    for slots, found, most in ((2, 0.374, 0.557), (4, 0.614, 0.783)):
        assert lru.rate(slots) == pytest.approx(found, abs=0.03)
        assert bound.rate(slots) == pytest.approx(most, abs=0.03)


def test_mix_keeps_more_than_lru_and_foresees_more_than_markov(made_up: Routings) -> None:
    scores = {s.policy: s for s in compare(made_up, [ExpertPolicyName.markov, ExpertPolicyName.mix], [4], Prefetch(2)).scores()}
    assert scores["mix"].hit_rate > scores["lru"].hit_rate
    assert scores["mix"].named_rate > scores["markov"].named_rate + 0.05


def test_what_mix_foresees_are_frequencies(made_up: Routings) -> None:
    policy = make_expert_policy(ExpertPolicyName.mix, made_up.layers, made_up.count, made_up.top_k)
    chances, uses = [], []
    for token in made_up.experts.astype(int):
        for layer, experts in enumerate(token.tolist()):
            chances.append(policy.foresee(layer).copy())
            uses.append(np.isin(np.arange(made_up.count), experts))
            policy.observe(layer, experts)
    chance, used = np.concatenate(chances), np.concatenate(uses)
    for low, high in ((0.1, 0.2), (0.2, 0.3), (0.3, 0.5), (0.5, 0.7)):
        within = (low <= chance) & (chance < high)
        assert used[within].mean() == pytest.approx(chance[within].mean(), abs=0.08)
