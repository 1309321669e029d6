"""Waits of visits that miss experts: the mean over how many each misses, by lines that a program can hold."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.contract.bills.routed import Routed
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.expert_cache import ExpertCache
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.experts.expert_misses import ALL_ASKED, visit
from penstock.planner.contract.experts.policies.lru import LruPolicy
from penstock.planner.contract.experts.routing_files import read_routings
from penstock.planner.contract.experts.visit_waits import MISSED_AT, bent_lines, mean_of, wait_lines
from penstock.planner.contract.given.model import Experts, touched_experts
from penstock.planner.replay.replayed import hit_curve
from penstock.planner.simulate.routers import DrawnRouters
from tests.planner.small import MB, machine, model
from tests.planner.test_checkpoint import SHARED

RECORDED = SHARED.parent / "traces" / "tiny-mixtral.jsonl.xz"


def mean_wait(waits: tuple[float, ...], odds: float) -> float:
    """Over every way in which a visit's experts may be missed, each by itself."""
    asked, total = len(waits) - 1, 0.0
    for missed in product((False, True), repeat=asked):
        chance = prod(odds if each else 1 - odds for each in missed)
        total += chance * waits[sum(missed)]
    return total


@given(st.integers(1, 6), st.floats(0, 3), st.floats(0, 6), st.floats(0, 1))
def test_lines_touch_the_mean_wait_and_never_exceed_it(asked, copy_s, hides, odds) -> None:
    waits = tuple(max(0.0, copy_s * missed - hides) for missed in range(asked + 1))
    lines = wait_lines(waits)
    for at in (*MISSED_AT, odds):
        largest = max(line.none + line.each * at * asked for line in lines)
        true_s = mean_wait(waits, at)
        assert largest <= true_s + 1e-9
        if at in MISSED_AT:
            assert largest == pytest.approx(true_s, abs=1e-9)
        assert largest >= true_s - 0.02 * asked * copy_s


@given(st.lists(st.floats(0, 5), min_size=1, max_size=7), st.floats(0.01, 0.99), st.floats(0, 1))
def test_bent_lines_are_exact_where_they_are_asked_and_rise_ever_faster(more, odds, even) -> None:
    waits = tuple(sum(more[:n]) for n in range(len(more) + 1))
    lines, asked = bent_lines(waits, odds, even), len(more)
    assert [line.each for line in lines] == sorted(line.each for line in lines)
    assert max(line.none + line.each * odds * asked for line in lines) == pytest.approx(mean_of(waits, odds, even), abs=1e-9)
    for at in MISSED_AT:
        largest = max(line.none + line.each * at * asked for line in lines)
        assert at > odds or largest <= mean_of(waits, at, even) + 1e-9


def test_of_visits_that_miss_alike_the_mean_is_that_of_their_number() -> None:
    waits = (0.0, 0.0, 1.0, 4.0)
    assert mean_of(waits, 0.5, 1.0) == pytest.approx(0.5) and mean_of(waits, 0.5) == pytest.approx((0 + 0 * 3 + 1 * 3 + 4) / 8)
    assert mean_of(waits, 0.5, 0.5) == pytest.approx((0.5 + 7 / 8) / 2)


def test_who_misses_few_waits_for_none() -> None:
    """Eight experts, of which launches hide five: half missed is four on average, and hardly a wait."""
    lines = wait_lines(tuple(max(0.0, missed - 5.0) for missed in range(9)))
    few, all_of_them = (max(line.none + line.each * missed for line in lines) for missed in (4, 8))
    assert all_of_them == pytest.approx(3.0) and 0 < few < 0.3


@given(fetch_s=st.floats(1e-5, 0.1), odds=st.floats(0, 1))
def test_reads_of_rows_wait_for_no_more_than_the_mean_visit_and_for_all_of_it_where_none_or_all_are_read(fetch_s, odds) -> None:
    """Two rows of two experts each, which are all different."""
    small = model(layers=4, experts=64)
    routed, asked = Routed.of(machine(), small, 2), 4
    hides = routed.beside_reads_s
    assert hides is not None and Routed.of(machine(), small, 1).beside_reads_s is None
    waits = tuple(max(0.0, fetch_s * missed - hides) for missed in range(asked + 1))
    for at in (0.0, odds, 1.0):
        largest, true_s = max(routed.reading([(at * asked * 4, fetch_s, 0.0)], 1.0)), 4 * mean_wait(waits, at)
        assert largest <= true_s + 1e-9
        if at in (0.0, 1.0):
            assert max(0.0, largest) == pytest.approx(true_s, abs=1e-9)


@pytest.mark.parametrize(
    ("count", "top_k", "tokens"), [(8, 2, 1), (8, 2, 4), (8, 2, 8), (128, 8, 16), (128, 8, 22), (128, 4, 40), (4, 4, 1)]
)
def test_visits_of_nearly_all_experts_are_as_many_as_are_drawn(count: int, top_k: int, tokens: int) -> None:
    experts = Experts(count, top_k, MB, (0,), default_hit_rates(count, top_k))
    routers, law = DrawnRouters(experts, ExpertPolicyName.lru, 1), visit(experts, tokens)
    touched = np.array([len(routers.next(0, tokens, 1, False).experts) for _ in range(2000)])
    assert law.all_asked == pytest.approx(np.mean(touched >= ALL_ASKED * count), abs=0.05)
    assert law.touched == pytest.approx(touched.mean(), rel=0.005)


@pytest.mark.skipif(not RECORDED.exists(), reason="needs the shared routings")
@pytest.mark.parametrize("rows", [2, 4, 8, 16])
def test_rows_of_other_prompts_touch_as_many_experts_as_one_tokens_hits_say(rows: int) -> None:
    """An even router's would touch up to half more of a trained model's."""
    routings, draw = read_routings(RECORDED), np.random.default_rng(0)
    decoded = np.flatnonzero(routings.decode)
    prompts = [decoded[routings.prompt[decoded] == prompt] for prompt in np.unique(routings.prompt[decoded])]
    found = []
    for _ in range(100):
        tokens = [draw.choice(prompts[at]) for at in draw.permutation(len(prompts))[:rows]]
        found += [len(np.unique(routings.experts[tokens, layer])) for layer in range(routings.layers)]
    rates = tuple(float(rate) for rate in hit_curve(routings, ExpertPolicyName.mix))
    experts = Experts(routings.count, routings.top_k, MB, tuple(range(routings.layers)), rates)
    assert touched_experts(experts, rows) == pytest.approx(np.mean(found), rel=0.05)


@pytest.mark.parametrize(("rows", "slots"), [(4, 40), (16, 40), (16, 90)])
def test_slots_find_of_many_rows_what_lru_finds_of_drawn_ones(rows: int, slots: int) -> None:
    experts = Experts(128, 8, MB, (0,), default_hit_rates(128, 8, ExpertPolicyName.lru))
    routers, cache = DrawnRouters(experts, ExpertPolicyName.lru, 1), ExpertCache({0: slots}, slots + 128, 128, LruPolicy(1, 128, 8))
    missed = []
    for step in range(300):
        routing = routers.next(0, rows, 1, False)
        seen = cache.find(0, routing.experts)
        for expert in seen.misses:
            cache.take(0, expert)
        cache.judge(0, routing)
        for slot in cache.settle_all(0, routing.experts):
            cache.give_back(slot)
        missed += [len(seen.misses)] if step >= 50 else []
    assert visit(experts, rows).missed(slots) == pytest.approx(np.mean(missed), rel=0.03)
