"""Both tiers of experts: one policy, shown each visit once, and what each lets go, as a list of all ranks says it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.contract.experts.expert_cache import ALONE_WORTH, ExpertCache, Routing, _Ranks
from penstock.planner.contract.experts.expert_caches import expert_caches, keep_first
from penstock.planner.contract.experts.expert_slots import kept_at_first, kept_in_all, kept_slots
from penstock.planner.contract.given.model import Experts

LAYERS, COUNT, TOP_K = (0, 2, 3), 8, 2
EXPERTS = Experts(COUNT, TOP_K, 1 << 20, LAYERS, tuple(n / COUNT for n in range(COUNT + 1)))


class Drawn:
    """A policy of few different worths, so that many are alike; counts what it is shown."""

    needs_ahead = None

    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)
        self._worth = np.zeros((len(LAYERS), COUNT), np.float32)
        self.shown: list[tuple[int, list[int]]] = []

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        self.shown.append((layer, list(experts)))
        self._worth[layer] = self._random.integers(0, 4, COUNT)

    def study(self, layer: int, routed: np.ndarray) -> None:
        self.observe(layer, routed.ravel().tolist())

    def worth(self, layer: int) -> np.ndarray:
        return self._worth[layer]

    def foresee(self, layer: int) -> np.ndarray:
        return np.zeros(COUNT)


def tiers(vram: int, dram: int, seed: int, policy: Drawn) -> tuple[ExpertCache, ExpertCache]:
    quotas = [dict.fromkeys(LAYERS, each) for each in (vram, dram)]
    above = ExpertCache(quotas[0], vram * len(LAYERS) + COUNT, COUNT, policy)
    return above, ExpertCache(quotas[1], dram * len(LAYERS) + COUNT, COUNT, policy, above)


def ranks_above(above: ExpertCache, below: ExpertCache, layer: int, worths: Sequence[float]) -> list[tuple[float, int]]:
    """(worth, -number) of each expert in the tier above, where what the tier below does not keep counts more often."""
    lost = not below.still
    return [(worth * (ALONE_WORTH if lost and not below.keeps(layer, e) else 1.0), -e) for e, worth in enumerate(worths)]


def ranks_below(
    above: ExpertCache, below: ExpertCache, layer: int, worths: Sequence[float], used: Sequence[int]
) -> list[tuple[float, int]]:
    """The same in the tier below: what the other one keeps behind a visit that has ``used`` experts goes first, but for its own least."""
    own = ranks_above(above, below, layer, worths)
    behind = sorted({*above._kept[layer], *used}, key=own.__getitem__, reverse=True)[: above._quotas[layer]]
    spare = behind[-1] if behind and below._quotas[layer] > above._quotas[layer] > 1 else -1
    return [(-math.inf if e in behind and e != spare else worth, -e) for e, worth in enumerate(worths)]


@settings(deadline=None, max_examples=60)
@given(vram=st.integers(0, 4), dram=st.integers(0, 5), seed=st.integers(0, 10**6))
def test_the_least_is_what_a_list_of_all_ranks_says_and_the_policy_is_shown_each_visit_once(vram: int, dram: int, seed: int) -> None:
    draw, policy = random.Random(seed), Drawn(seed)
    card, below = tiers(vram, dram, seed, policy)
    visits = 0
    for k in range(24):
        layer = LAYERS[k % len(LAYERS)]
        routing = Routing(np.array([draw.sample(range(COUNT), draw.randint(TOP_K, 4))]), draw.random() < 0.2)
        near = card.find(layer, routing.experts)
        far = below.find(layer, near.misses)
        card.judge(layer, routing)
        below.judge(layer, routing)
        visits += 1
        worths = policy.worth(LAYERS.index(layer)).tolist()
        above, under = ranks_above(card, below, layer, worths), ranks_below(card, below, layer, worths, routing.experts)
        for cache, ranks in ((card, above), (below, under)):
            if cache._kept[layer]:
                assert cache._ranks(layer).least(cache._kept[layer], -1) == min(cache._kept[layer], key=ranks.__getitem__)
        for cache, used, missed in ((card, routing.experts, near.misses), (below, near.misses, far.misses)):
            for expert in missed:
                cache.take(layer, expert)
            for slot in cache.settle_all(layer, used):
                cache.give_back(slot)
    assert len(policy.shown) == visits


@settings(deadline=None, max_examples=100)
@given(vram=st.integers(0, 4), dram=st.integers(0, 5), seed=st.integers(0, 10**6), aside=st.booleans())
def test_both_tiers_keep_the_same_in_whatever_order_a_visits_experts_come(vram: int, dram: int, seed: int, aside: bool) -> None:
    """Reads end in any order, and each lets go of slots in both tiers as it does. Some experts never pass through VRAM."""

    def kept(order: int) -> list[list[set[int]]]:
        draw, mixed = random.Random(seed), random.Random(order)
        card, below = tiers(vram, dram, seed, Drawn(seed))
        found = []
        for k in range(24):
            layer = LAYERS[k % len(LAYERS)]
            routing = Routing(np.array([draw.sample(range(COUNT), draw.randint(TOP_K, 4))]), draw.random() < 0.2)
            near = card.find(layer, routing.experts)
            far = below.find(layer, near.misses)
            elsewhere = {e for e in near.misses if e not in far.misses and draw.random() < 0.5} if aside else set()
            below.set_aside(elsewhere)
            card.judge(layer, routing)
            below.judge(layer, routing)
            used = mixed.sample(routing.experts, len(routing.experts))
            for expert in used:
                if expert in near.misses and expert not in elsewhere:
                    card.take(layer, expert)
                if expert in far.misses:
                    below.take(layer, expert)
            while used:
                some = [used.pop() for _ in range(mixed.randint(1, len(used)))]
                for cache, its in ((card, [e for e in some if e not in elsewhere]), (below, [e for e in some if e in near.misses])):
                    for slot in cache.settle_all(layer, its):
                        cache.give_back(slot)
            found.append([{e for e in range(COUNT) if cache.keeps(layer, e)} for cache in (card, below)])
        return found

    assert kept(1) == kept(2) == kept(3)


@settings(deadline=None, max_examples=60)
@given(vram=st.integers(0, 3), dram=st.integers(0, 5), seed=st.integers(0, 10**6))
def test_what_passes_through_frees_its_slot_first_and_what_a_visit_evicts_before_what_it_keeps(vram: int, dram: int, seed: int) -> None:
    """Of what DRAM has when it is asked. Some of that came ahead of the visit."""
    draw = random.Random(seed)
    card, below = tiers(vram, dram, seed, Drawn(seed))
    for k in range(24):
        layer = LAYERS[k % len(LAYERS)]
        for expert in draw.sample(range(COUNT), draw.randint(0, 2)):
            if below.slot(layer, expert) is None:
                below.take(layer, expert)
        chosen = draw.sample(range(COUNT), draw.randint(TOP_K, COUNT - 1))
        routing = Routing(np.array([chosen]), draw.random() < 0.5)
        near = card.find(layer, chosen)
        seen = below.find(layer, near.misses)
        for slot in seen.dropped:
            below.give_back(slot)
        card.judge(layer, routing)
        below.judge(layer, routing)
        passes = {e for e in seen.hits if not below.keeps(layer, e)}
        order = below.leaving_first(layer, draw.sample(seen.hits, len(seen.hits)))
        for cache, missed, used in ((card, near.misses, chosen), (below, seen.misses, near.misses)):
            for expert in missed:
                cache.take(layer, expert)
            for slot in cache.settle_all(layer, used):
                cache.give_back(slot)
        assert sorted(order) == sorted(seen.hits) and {*order[: len(passes)]} == passes
        stays = [below.keeps(layer, e) for e in order[len(passes) :]]
        assert stays == sorted(stays)


@given(vram=st.integers(0, EXPERTS.units), dram=st.integers(0, EXPERTS.units))
def test_a_start_fills_both_tiers_with_as_many_different_experts_as_they_can_hold(vram: int, dram: int) -> None:
    card, below = expert_caches(EXPERTS, ExpertSlots(vram, dram), gpu=True)
    assert card is not None
    keep_first(EXPERTS, card, below)
    kept = [[cache.keeps(layer, e) for layer in LAYERS for e in range(COUNT)] for cache in (card, below)]
    assert [sum(of) for of in kept] == [kept_in_all(EXPERTS, slots) for slots in (vram, dram)], "no slot of a layer's own is empty"
    assert sum(map(any, zip(*kept, strict=True))) == kept_at_first(EXPERTS, vram, dram)
    for layer, each in kept_slots(EXPERTS, vram).items():
        apart = min(COUNT, each + kept_slots(EXPERTS, dram)[layer])
        assert sum(card.keeps(layer, e) or below.keeps(layer, e) for e in range(COUNT)) == apart


def test_vram_rather_lets_go_what_dram_holds_than_what_would_be_read_again() -> None:
    """Expert 1 comes and is worth most. VRAM has 0, worth 2, and 2, worth 3; what DRAM does not have counts twice."""

    class Even(Drawn):
        def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
            self._worth[layer, :3] = 2.0, 5.0, 3.0

    for in_dram, goes in (((1, 2, 3), 2), ((0, 1, 3), 0)):
        card, below = tiers(2, 3, 0, Even(0))
        for expert in in_dram:
            below.keep(0, expert)
        for expert in (0, 2):
            card.keep(0, expert)
        routing = Routing(np.array([[1, 0]]), prompt=False)
        assert card.find(0, routing.experts).misses == (1,)
        card.judge(0, routing)
        card.take(0, 1)
        card.settle_all(0, routing.experts)
        assert not card.keeps(0, goes) and card.keeps(0, 1), in_dram


def test_the_tiers_of_a_plan_ask_one_policy() -> None:
    vram, dram = expert_caches(EXPERTS, ExpertSlots(9, 15), gpu=True)
    assert vram is not None and vram._policy is dram._policy


def test_a_tier_asks_for_itself_where_the_one_above_has_nothing_to_decide() -> None:
    policy = Drawn(0)
    units = COUNT * len(LAYERS)
    above = ExpertCache(dict.fromkeys(LAYERS, COUNT), units, COUNT, policy)
    below = ExpertCache(dict.fromkeys(LAYERS, 1), len(LAYERS) + COUNT, COUNT, policy, above)
    routing = Routing(np.array([[1, 2]]), prompt=False)
    above.judge(2, routing)
    below.judge(2, routing)
    assert policy.shown == [(1, [1, 2])]


@given(
    worths=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=9, max_size=9),
    first=st.sets(st.integers(0, 8)),
    experts=st.sets(st.integers(0, 8)),
)
def test_what_is_sorted_by_worth_goes_as_places_say(worths: list[float], first: set[int], experts: set[int]) -> None:
    ranks = _Ranks(worths, first)
    assert ranks.ordered(experts) == sorted(experts, key=ranks.place)
    assert ranks.least(experts, -1) == next(iter(ranks.ordered(experts)), -1)
