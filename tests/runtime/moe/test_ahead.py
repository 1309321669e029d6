"""What a tier fetches ahead, under a device and a drive whose work is over when they are told so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import LIKELY
from penstock.planner.contract.experts.expert_slots import kept_slots
from penstock.planner.contract.experts.policies import FarSight
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.runtime.experts.card_experts import CardExperts
from penstock.runtime.experts.host_experts import ComputeClock
from penstock.runtime.experts.tiers.dram_experts import DramExperts, slot_bytes
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.device import Event
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.reads_inbox import PlainInbox
from tests.runtime.moe.tiers import (
    COUNT,
    ELEMENTS,
    EXPERTS,
    LAYERS,
    TOP_K,
    Clock,
    Whims,
    card_tier,
    check,
    dram_tier,
    each_of,
)
from tests.support import HostCopier


class SlowCard(HostCopier):
    """Copies that are over once ``over`` says so: events are numbered from 1."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.over, self.events = 0, 0

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        super().copy(dst, src)
        self.sizes.append(dst.numel())

    def copy_event(self) -> float:
        self.events += 1
        return self.events

    def done(self, event: float) -> bool:
        return self.over >= event


class Certain(Whims):
    """Foresees experts 0 and 1 of every layer."""

    def worth(self, layer: int) -> np.ndarray:
        return np.arange(COUNT) / COUNT

    def foresee(self, layer: int) -> np.ndarray:
        return np.array([1.0, 0.9] + [0.0] * (COUNT - 2))


def three_slots(policy: Whims, far: FarSight | None = None, prefetch: int = 1) -> ExpertCache:
    """All for experts that pass through."""
    return ExpertCache(kept_slots(EXPERTS, 3), 3, COUNT, policy, None, far, Prefetch(prefetch, LIKELY))


@contextmanager
def on_slow_card(
    layouts: dict, device: SlowCard, cache: ExpertCache, clock: ComputeClock | None = None, chunk_bytes: int = 2 * ALIGN
) -> Iterator[tuple[CardExperts, DramExperts]]:
    """A card of three slots over a DRAM that has every expert, both ready."""
    with dram_tier(layouts, EXPERTS.units, 0, cache, True) as below:
        card = card_tier(layouts, 3, below, cache, device, clock, chunk_bytes)
        card.start()
        yield card, below


def test_what_is_fetched_ahead_waits_in_few_chunks_and_ends_when_it_was_wrong(layouts: dict) -> None:
    """Two chunks are queued at a time. The next layer wants another expert: its copy comes right behind them, and no third chunk does."""
    whole, chunk = 8 * ELEMENTS, 2 * ALIGN
    device = SlowCard()
    with on_slow_card(layouts, device, three_slots(Certain(0))) as (card, _):
        list(each_of(card, 1, Routing(np.array([[3]]), prompt=False)))
        assert device.sizes == [whole, chunk, chunk]
        card.fetch_ahead()
        assert len(device.sizes) == 3
        device.over = 3
        card.fetch_ahead()
        assert device.sizes == [whole, chunk, chunk, whole - 2 * chunk]
        device.over = 5
        list(each_of(card, 2, Routing(np.array([[0, 3]]), prompt=False)))
        assert device.sizes[4:] == [whole, chunk, chunk] and card.stats.ahead_used == 1
        list(each_of(card, 4, Routing(np.array([[5]]), prompt=False)))
        assert device.sizes[7:] == [whole] and card.stats.ahead_used == 1


def test_nothing_is_fetched_ahead_behind_the_end(layouts: dict) -> None:
    """Of what is named two chunks are queued. Then the stream ends, and the layers compute once more, to be timed."""
    device = SlowCard()
    with on_slow_card(layouts, device, three_slots(Certain(0), prefetch=2)) as (card, below):
        list(each_of(card, 1, Routing(np.array([[3]]), prompt=False)))
        queued = len(device.sizes)
        card.close()
        below.close()
        device.over = 10**6
        card.fetch_ahead()
        assert len(device.sizes) == queued


def test_a_prompts_next_layer_is_fetched_without_a_throttle_but_not_the_first_layer_of_the_next_pass(layouts: dict) -> None:
    """Slots are for three experts to pass: two of the next layer's are on their way at once, whole, and one is left for a demand."""
    whole, chunk = 8 * ELEMENTS, 2 * ALIGN
    device, every = SlowCard(), Routing(np.array([range(COUNT)]), prompt=True)
    with on_slow_card(layouts, device, three_slots(Certain(0))) as (card, _):
        list(each_of(card, 1, every))
        assert device.sizes[COUNT:] == [whole, whole]
        list(each_of(card, 2, every))
        device.over, before = device.events, len(device.sizes)
        list(each_of(card, 4, Routing(np.array([range(2, COUNT)]), prompt=True)))
        assert card.stats.ahead == 2 + 2 + 1 and card.stats.ahead_used == 2
        assert device.sizes[before:] == [whole] * (COUNT - 2) + [chunk, chunk]


class Stopwatch(Clock):
    """Writes down for which copies computing stood still."""

    def __init__(self) -> None:
        self.awaited: list[Event | None] = []
        self.paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self, arrival: Event | None = None) -> None:
        if self.paused:
            self.awaited.append(arrival)
        self.paused = False


def test_computing_stands_still_for_what_was_fetched_ahead_until_it_has_come(layouts: dict) -> None:
    for over, awaited in ((0, 1), (10**6, 0)):
        device, clock = SlowCard(), Stopwatch()
        with on_slow_card(layouts, device, three_slots(Certain(0)), clock=clock, chunk_bytes=8 * ELEMENTS) as (card, _):
            list(each_of(card, 1, Routing(np.array([[3]]), prompt=False)))
            assert len(device.sizes) == 2 and len(clock.awaited) == 1
            device.over = over
            clock.awaited.clear()
            list(each_of(card, 2, Routing(np.array([[0]]), prompt=False)))
            assert len(device.sizes) == 3 and len(clock.awaited) == awaited


def test_computing_stands_still_while_the_host_waits_for_the_ssd(layouts: dict) -> None:
    """The copies themselves are over at once."""
    cache = three_slots(Certain(0), prefetch=0)
    device, clock = SlowCard(), Stopwatch()
    device.over = 10**6
    with dram_tier(layouts, 3, 0, cache, False) as below:
        card = card_tier(layouts, 3, below, cache, device, clock)
        card.start()
        seen = []
        for expert, _ in each_of(card, 1, Routing(np.array([[3, 4]]), prompt=False)):
            seen.append((expert, clock.paused, len(clock.awaited)))
    assert sorted(e for e, *_ in seen) == [3, 4] and [s[1:] for s in seen] == [(False, 1), (False, 2)]


class Third(FarSight):
    """Is sure which expert the layer after the next one uses."""

    def __init__(self, expert: int):
        super().__init__(len(LAYERS), COUNT, TOP_K)
        self._expert = expert

    def named(self, layer: int, most: int) -> list[tuple[int, int]]:
        return [(2, self._expert)] if layer == 0 else []


class Blind(Whims):
    """Foresees nothing of the next layer."""

    def foresee(self, layer: int) -> np.ndarray:
        return np.zeros(COUNT)


def test_what_is_fetched_for_a_farther_layer_stays_until_it_is_that_layers_turn(layouts: dict) -> None:
    device = SlowCard()
    device.over = 10**6
    with on_slow_card(layouts, device, three_slots(Blind(0), Third(5))) as (card, _):
        list(each_of(card, 1, Routing(np.array([[3]]), prompt=False)))
        assert card.stats.ahead == 1 and sum(device.sizes) == 2 * 8 * ELEMENTS
        list(each_of(card, 2, Routing(np.array([[0]]), prompt=False)))
        copied = sum(device.sizes)
        for expert, parameters in each_of(card, 4, Routing(np.array([[5]]), prompt=False)):
            check(4, expert, parameters)
        assert sum(device.sizes) == copied and card.stats.ahead_used == 1


def test_the_link_fetches_ahead_while_the_ssd_is_waited_for(layouts: dict) -> None:
    """DRAM has two experts of each layer: not the third of the first layer, but the first of the layer that is named."""
    cache = three_slots(Blind(0), Third(0))
    device = SlowCard()
    with dram_tier(layouts, 2 * len(LAYERS) + 3, 0, cache, True) as below:
        card = card_tier(layouts, 3, below, cache, device)
        card.start()
        for expert, parameters in each_of(card, 1, Routing(np.array([[3]]), prompt=False)):
            check(1, expert, parameters)
            assert card.stats.ahead == 1 and device.sizes[:2] == [2 * ALIGN, 2 * ALIGN]
            assert sum(device.sizes) == 4 * ALIGN + 8 * ELEMENTS


def test_what_is_fetched_ahead_takes_no_slot_of_one_tokens_experts_on_the_ssd(layouts: dict) -> None:
    """Three slots, a token of three experts that DRAM has none of, and experts of the next layer that it has: the three come together.
    Where one is missed, another slot is for what comes ahead."""
    for missed, ahead in (((3, 4, 5), 0), ((3,), 1)):
        cache = three_slots(Certain(0))
        with dram_tier(layouts, 2 * len(LAYERS) + 3, 0, cache, True, ahead=0) as below:
            card = card_tier(layouts, 3, below, cache, SlowCard())
            card.start()
            (group,) = card.groups(1, Routing(np.array([missed]), prompt=False))
            assert {expert for expert, _ in group.arrived} == {*missed} and card.stats.ahead == ahead
            for expert, parameters in group.arrived:
                check(1, expert, parameters)


def test_what_is_fetched_ahead_leaves_demands_the_slots_that_layers_are_about_to_keep() -> None:
    """Six slots: one for each layer to keep, all vacant, and three to pass through. A layer that keeps what it used gives no slot back."""
    cache = ExpertCache(dict.fromkeys((0, 1, 2), 1), 6, COUNT, Whims(0), ahead=Prefetch(1, LIKELY))
    ahead = iter((2, expert) for expert in range(COUNT))
    while cache.room_ahead:
        cache.take(*next(ahead))
    for layer in (0, 1):
        cache.find(layer, [0, 1])
        cache.judge(layer, Routing(np.array([[0, 1]]), prompt=False))
        for expert in (0, 1):
            assert cache.take(layer, expert) is not None
            for slot in cache.settle(layer, expert):
                cache.give_back(slot)
    assert next(ahead) == (2, 2)


class HeldReads:
    """A pool whose reads end when they are told to."""

    def __init__(self) -> None:
        self.open: list[tuple[str, Callable[[BaseException | None], None]]] = []
        self.urgent: list[str] = []

    def read_each(
        self, parts: Sequence[Sequence[Extent]], view: memoryview, dones: Sequence[Callable[[BaseException | None], None]], name: str,
        urgent: bool,
    ) -> None:  # fmt: skip
        self.open += [(name, done) for done in dones]
        self.urgent += [name] * urgent * len(parts)

    def inbox(self) -> PlainInbox:
        return PlainInbox()

    def end(self, name: str) -> None:
        """All of ``name`` that are open, and what these lead to."""
        while mine := [read for read in self.open if read[0] == name]:
            self.open = [read for read in self.open if read[0] != name]
            for _, done in mine:
                done(None)


def test_a_slot_of_what_was_fetched_in_vain_goes_at_once_to_what_waits_for_one(layouts: dict) -> None:
    arena, pool = Arena(3 * slot_bytes(layouts)), HeldReads()
    dram = DramExperts(
        layouts, arena, 0, ExpertCache(dict.fromkeys(LAYERS, 0), 3, COUNT, Certain(0), ahead=Prefetch(2, LIKELY)), pool, 1 << 20, 2
    )
    try:
        first, second = (Routing(np.array([experts]), prompt=False) for experts in ([4, 5], [2, 3]))
        dram.visit(1, first, first.experts)
        dram.judge(1, first)
        for expert in first.experts:
            pool.end(f"expert 1.{expert}")
            while not dram.next_parts(1, [expert]).over:
                pass
            dram.release(1, (expert,))
        assert {name for name, _ in pool.open} == {"expert 2.0", "expert 2.1"}
        dram.visit(2, second, second.experts)
        assert {name for name, _ in pool.open} == {"expert 2.0", "expert 2.1", "expert 2.2"}
        pool.end("expert 2.0")
        assert {name for name, _ in pool.open} == {"expert 2.1", "expert 2.2", "expert 2.3"}
        assert {*pool.urgent} == {"expert 1.4", "expert 1.5", "expert 2.2", "expert 2.3"}
        calls = []
        dram.next_parts(2, second.experts, lambda: (calls.append(0), pool.end("expert 2.3") if len(calls) == 3 else None))
        assert len(calls) == 3 and dram.stats.waits == 1
    finally:
        dram.close()
        arena.close()
