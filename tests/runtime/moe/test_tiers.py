"""Experts in their tiers: whatever is asked for, in whatever order, the right bytes lie there when they are computed with."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import LIKELY
from penstock.planner.contract.experts.expert_slots import fewest_slots, kept_slots
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.runtime.experts.host_experts import HostExperts
from penstock.runtime.experts.tiers.expert_fetch import most_of, parts_of
from penstock.runtime.reading.layout import Extent, UnitLayout
from tests.runtime.fakes import FakeDevice
from tests.runtime.moe.tiers import (
    COUNT,
    EXPERTS,
    LAYERS,
    Clock,
    FarWhims,
    Whims,
    arrivals,
    card_tier,
    check,
    compute_in_any_order,
    dram_tier,
    each_of,
    routings,
    uses,
)
from tests.support import HostCopier


@settings(deadline=None, max_examples=25)
@given(slots=st.integers(fewest_slots(EXPERTS), EXPERTS.units), seed=st.integers(0, 10**6), preload=st.booleans())
def test_the_cpu_computes_with_every_expert_once_a_visit(layouts: dict, slots: int, seed: int, preload: bool) -> None:
    with dram_tier(layouts, slots, seed, None, preload) as dram:
        source = HostExperts(dram, {key: layout.tensors for key, layout in layouts.items()}, Clock())
        for layer, routing in routings(seed, 24):
            used = []
            for expert, parameters in each_of(source, layer, routing):
                check(layer, expert, parameters)
                used.append(expert)
            assert sorted(used) == sorted(routing.experts)
        stats = dram.stats
    misses = stats.misses + stats.prompt_misses
    assert stats.hits + stats.prompt_hits + misses == uses(seed, 24)
    assert stats.ahead_used <= stats.ahead and (slots < EXPERTS.units or not preload or not misses)


def test_a_tier_with_a_slot_for_every_expert_is_still_once_all_of_them_came(layouts: dict) -> None:
    with dram_tier(layouts, EXPERTS.units, 0, None, False) as dram:
        source = HostExperts(dram, {key: layout.tensors for key, layout in layouts.items()}, Clock())
        for visit, layer in enumerate(LAYERS + LAYERS):
            assert dram._cache.still == (visit >= len(LAYERS))
            for expert, parameters in each_of(source, layer, Routing(np.array([range(COUNT)]), prompt=False)):
                check(layer, expert, parameters)
        assert dram.stats.hits + dram.stats.misses == 2 * EXPERTS.units and dram.stats.visits == 2 * len(LAYERS)


slots_of = st.integers(fewest_slots(EXPERTS), EXPERTS.units)


@settings(deadline=None, max_examples=25)
@given(vram=slots_of, dram=slots_of, seed=st.integers(0, 10**6), prefetch=st.integers(0, 3), together=st.booleans())
def test_a_card_computes_with_every_expert_once_a_visit_and_fetches_ahead(
    layouts: dict, vram: int, dram: int, seed: int, prefetch: int, together: bool
) -> None:
    cache = ExpertCache(kept_slots(EXPERTS, vram), vram, COUNT, Whims(seed + 1), None, FarWhims(seed + 1), Prefetch(prefetch, LIKELY))
    with dram_tier(layouts, dram, seed, cache, True) as below:
        card = card_tier(layouts, vram, below, cache, HostCopier())
        card.start()
        for layer, routing in routings(seed, 24):
            used = []
            for expert, parameters in arrivals(card, layer, routing, together):
                check(layer, expert, parameters)
                used.append(expert)
            assert sorted(used) == sorted(routing.experts)


@settings(deadline=None, max_examples=25)
@given(vram=slots_of, seed=st.integers(0, 10**6), whole=st.booleans(), prefetch=st.integers(0, 3), together=st.booleans())
def test_kernels_find_their_expert_in_any_order_of_copies_and_kernels(
    layouts: dict, vram: int, seed: int, whole: bool, prefetch: int, together: bool
) -> None:
    """Copies and kernels are done in any order that streams and events allow; the bytes are looked at when the kernel runs."""
    draw = random.Random(seed)
    device = FakeDevice(lambda enabled: draw.choice(list(enabled)))
    cache = ExpertCache(kept_slots(EXPERTS, vram), vram, COUNT, Whims(seed + 1), None, FarWhims(seed + 1), Prefetch(prefetch, LIKELY))
    with dram_tier(layouts, EXPERTS.units if whole else 9, seed, cache, True) as below:
        card = card_tier(layouts, vram, below, cache, device)
        compute_in_any_order(card, device, draw, seed, together)


def test_a_failed_read_is_raised_where_the_expert_is_waited_for(layouts: dict, tmp_path: Path) -> None:
    gone = {key: UnitLayout(x.nbytes, x.tensors, tuple(Extent(tmp_path / "gone", *vars_of(e)) for e in x.extents), x.payload_bytes)
            for key, x in layouts.items()}  # fmt: skip
    with dram_tier(gone, 6, 1, None, False) as dram:
        source = HostExperts(dram, {key: layout.tensors for key, layout in gone.items()}, Clock())
        with pytest.raises(Exception, match="gone"):
            list(each_of(source, 1, Routing(np.array([[0, 1]]), prompt=False)))


def vars_of(extent: Extent) -> tuple[int, int, int]:
    return extent.offset, extent.nbytes, extent.dest


@pytest.mark.parametrize(
    "sizes",
    [(8_294_400, 518_400, 11_520, 4_147_200, 259_200, 5_760), (4_147_200, 8_294_400, 5_760, 11_520, 259_200, 518_400), (117_440_512,) * 3],
    ids=["gpt-oss-120b", "gpt-oss-120b by names", "Mixtral-8x7B"],
)
def test_a_third_of_an_expert_is_left_to_copy_when_the_ssd_has_brought_it(sizes: tuple[int, ...]) -> None:
    """As published, at odd places of its file."""
    extents, end = [], 77
    for nbytes in sizes:
        extents.append(Extent(Path("weights"), end * 3, nbytes, end))
        end += nbytes + 1000
    parts = parts_of(UnitLayout(end, (), tuple(extents), sum(sizes)), most_of(end))
    assert [sum(extent.nbytes for extent in part) for part in parts] == pytest.approx([sum(sizes) * 2 / 3, sum(sizes) / 3], rel=0.01)
    assert len(parts[-1]) == 1, "of the largest tensor: what is looked at has come before"


@given(pieces=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 300_000)), min_size=1, max_size=6), most=st.integers(4096, 10**6))
def test_parts_are_all_of_an_expert_and_no_larger_than_was_said(pieces: list[tuple[int, int]], most: int) -> None:
    extents, end = [], 0
    for offset, nbytes in pieces:
        extents.append(Extent(Path("weights"), offset, nbytes, end))
        end += nbytes
    parts = parts_of(UnitLayout(end, (), tuple(extents), end), most)
    assert all(sum(e.nbytes for e in part) <= most for part in parts)
    at = 0
    for piece in sorted((e for part in parts for e in part), key=lambda e: e.dest):
        whole = next(e for e in extents if e.dest <= piece.dest < e.dest + e.nbytes)
        assert (piece.dest, piece.offset - whole.offset) == (at, piece.dest - whole.dest) and piece.nbytes > 0
        at += piece.nbytes
    assert at == end


def test_one_tokens_missed_experts_come_together_behind_one_event(layouts: dict) -> None:
    """As many as a token has, with slots for no more: copies of all are queued before any kernel, and computing waits once."""
    device, chosen = FakeDevice(), [5, 1]
    cache = ExpertCache(kept_slots(EXPERTS, fewest_slots(EXPERTS)), fewest_slots(EXPERTS), COUNT, Whims(0))
    with dram_tier(layouts, EXPERTS.units, 0, cache, True) as below:
        card = card_tier(layouts, fewest_slots(EXPERTS), below, cache, device)
        group = next(iter(card.groups(1, Routing(np.array([chosen]), prompt=False))))
        events = [work for work in device._queues["copies"] if hasattr(work, "event")]
        assert [expert for expert, _ in group.arrived] == chosen and len(events) == 1
        group.come()
        assert len([work for work in device._queues["compute"] if hasattr(work, "event")]) == 1, "one wait, and no event"


def test_what_the_ssd_brings_is_computed_with_what_was_there_and_the_policy_is_asked_behind_it(layouts: dict) -> None:
    """One group of a hit and a miss of both tiers. Where nothing is read, a visit decides and gives slots back when the next router is
    waited for."""
    few = fewest_slots(EXPERTS)
    cache = ExpertCache(kept_slots(EXPERTS, few + len(LAYERS)), few + len(LAYERS), COUNT, Whims(0))
    with dram_tier(layouts, few + len(LAYERS), 0, cache, True) as below:
        card = card_tier(layouts, few + len(LAYERS), below, cache, HostCopier())
        card.start()
        (kept,), judged = cache._kept[1], []
        missed = next(e for e in range(COUNT) if not below.here(1, e) and e != kept)
        judge = cache.judge
        cache.judge = lambda layer, routing: (judged.append(layer), judge(layer, routing))
        (group,) = card.groups(1, Routing(np.array([[missed, kept]]), prompt=False))
        assert [expert for expert, _ in group.arrived] == [kept, missed] and judged == [1]
        card.catch_up()
        (kept,) = cache._kept[2]
        (group,) = card.groups(2, Routing(np.array([[kept]]), prompt=False))
        assert len(group.arrived) == 1 and judged == [1]
        card.route(torch.zeros(1, 1), torch.zeros(1, 1))
        assert judged == [1, 2]


@given(seed=st.integers(0, 10**6), quota=st.integers(0, 3), top_k=st.integers(1, COUNT))
def test_experts_settled_together_are_settled_as_one_by_one(seed: int, quota: int, top_k: int) -> None:
    def run(together: bool) -> list[object]:
        draw, said = random.Random(seed), []
        cache = ExpertCache(dict.fromkeys(LAYERS, quota), quota * len(LAYERS) + COUNT, COUNT, Whims(seed))
        for k in range(20):
            layer, chosen = LAYERS[k % len(LAYERS)], draw.sample(range(COUNT), top_k)
            for expert in cache.find(layer, chosen).misses:
                cache.take(layer, expert)
            cache.judge(layer, Routing(np.array([chosen]), prompt=False))
            one_by_one = (slot for expert in chosen for slot in cache.settle(layer, expert))
            let_go = cache.settle_all(layer, chosen) if together else [*one_by_one]
            for slot in let_go:
                cache.give_back(slot)
            said.append((let_go, [cache.slot(layer, expert) for expert in range(COUNT)]))
        return said

    assert run(True) == run(False)
