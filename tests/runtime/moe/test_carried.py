"""Missed experts that the threads which read them copy on: the right bytes, in any order of copies and kernels, and nothing afterwards."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import LIKELY
from penstock.planner.contract.experts.expert_slots import fewest_slots, kept_slots
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.runtime.experts.card_experts import CardExperts
from penstock.runtime.memory.bare_copies import DriverCalls
from penstock.runtime.reading.native.readers_library import readers_file
from tests.cli import HANGS_S
from tests.runtime.fakes import FakeDevice, FakeEvent, FlagEvent, _Record, _Wait
from tests.runtime.moe.tiers import COUNT, EXPERTS, LAYERS, FarWhims, Whims, arrivals, card_tier, check, compute_in_any_order, dram_tier
from tests.runtime.test_native_readers import Held
from tests.support import COPY, ENTER, RECORD, WAIT, WORD

pytestmark = pytest.mark.skipif(not readers_file().exists(), reason="no compiler made the readers")
slots_of = st.integers(fewest_slots(EXPERTS), EXPERTS.units)
LEAST = fewest_slots(EXPERTS) + len(LAYERS)

CONTEXT, STREAM, KERNELS = 77, 88, 99


class CarryingDevice(FakeDevice):
    """A device whose copies other threads queue by functions in C; ``refuses`` is what the next copies return. With ``words`` kernels wait
    for what has not been read, ``unread`` times."""

    def __init__(self, choose: Callable[[Any], str] = lambda enabled: enabled[0], words: bool = False):
        super().__init__(choose)
        self.refuses = self.carried = self.waits = self.unread = 0
        self.word = torch.zeros(1, dtype=torch.int32)
        self._words = words
        self.threads: set[str] = set()
        self._ahead: dict[int, FakeEvent] = {}
        plain = ENTER(self._enter), COPY(self._copy), RECORD(self._recorded), WAIT(self._waited)
        self._calls = *plain, WORD(self._written), WORD(self._reached)

    def driver_calls(self) -> DriverCalls | None:
        enter, copy, record, wait, write, until = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self._calls)
        word = self.word.data_ptr() if self._words else 0
        return DriverCalls(enter, CONTEXT, copy, record, STREAM, wait, KERNELS, write, until, word)

    def finish(self, stream: str, choose: Callable[[Any], str] = lambda enabled: enabled[0]) -> None:
        """Also what waits for readers."""
        end_s = time.monotonic() + HANGS_S
        while self._queues[stream]:
            enabled = self.enabled()
            if enabled:
                self.advance(choose(enabled))
            else:
                assert time.monotonic() < end_s, "kernels wait for what nobody brings"
                time.sleep(1e-4)

    def _written(self, stream: int, word: int, value: int, flags: int) -> int:
        assert (stream, word, flags) == (STREAM, self.word.data_ptr(), 0)
        self._queues["copies"].append(partial(self.word.fill_, value))
        return 0

    def _reached(self, kernels: int, word: int, value: int, flags: int) -> int:
        assert (kernels, word, flags) == (KERNELS, self.word.data_ptr(), 0)
        self.unread += 1
        self._queues["compute"].append(_Wait(FlagEvent(self.word, value)))
        return 0

    def event_ahead(self) -> tuple[FakeEvent, int]:
        event, handle = FakeEvent(), len(self._ahead) + 1
        self._ahead[handle] = event
        return event, handle

    def _enter(self, context: int) -> int:
        self.threads.add(threading.current_thread().name)
        return 0 if context == CONTEXT else 201

    def _copy(self, to: int, source: int, nbytes: int, stream: int) -> int:
        assert stream == STREAM
        if not self.refuses:
            self.carried += 1
            self._queues["copies"].append(partial(ctypes.memmove, to, source, nbytes))
        return self.refuses

    def _recorded(self, event: int, stream: int) -> int:
        self._queues["copies"].append(_Record(self._ahead[event]))
        return 0

    def _waited(self, stream: int, event: int, flags: int) -> int:
        assert (stream, flags) == (KERNELS, 0)
        self.waits += 1
        self.compute_waits(self._ahead[event])
        return 0


def cache_of(vram: int, seed: int, prefetch: int = 0) -> ExpertCache:
    return ExpertCache(kept_slots(EXPERTS, vram), vram, COUNT, Whims(seed + 1), None, FarWhims(seed + 1), Prefetch(prefetch, LIKELY))


@settings(deadline=None, max_examples=40)
@given(vram=slots_of, dram=slots_of, seed=st.integers(0, 10**6), prefetch=st.integers(0, 3), together=st.booleans(), words=st.booleans())
def test_kernels_find_what_readers_copied_in_any_order(
    layouts: dict, vram: int, dram: int, seed: int, prefetch: int, together: bool, words: bool
) -> None:
    """Kernels look at the bytes when they run. What waits for a kernel, or for a copy, is done in any order that streams allow."""
    draw = random.Random(seed)
    device, cache = CarryingDevice(lambda enabled: draw.choice(list(enabled)), words), cache_of(vram, seed, prefetch)
    with dram_tier(layouts, dram, seed, cache, True) as below:
        card = card_tier(layouts, vram, below, cache, device)
        compute_in_any_order(card, device, draw, seed, together)
        card.close()


def visited(layouts: dict, device: FakeDevice, seed: int, prefetch: int) -> tuple[list[object], dict[str, int], int]:
    """What the card gave and kept, visit by visit, what it counted, and the bytes that were booked. Nothing is read ahead: reads that come
    earlier or later would leave DRAM with other experts, and what DRAM keeps the card lets go first."""
    cache, given_ = cache_of(LEAST, seed, prefetch), list[object]()
    with dram_tier(layouts, LEAST, seed, cache, True, ahead=0) as below:
        card = card_tier(layouts, LEAST, below, cache, device)
        draw = np.random.default_rng(seed)
        for k in range(30):
            layer, routing = LAYERS[k % len(LAYERS)], Routing(draw.permutation(COUNT)[None, :2], prompt=False)
            groups = list[list[int]]()
            for group in card.groups(layer, routing):
                group.come()
                groups.append(sorted(expert for expert, _ in group.arrived))
            given_.append(groups)
            card.catch_up()
            given_.append(sorted(e for e in range(COUNT) if cache.keeps(layer, e)))
            while device.enabled():
                device.advance(device.enabled()[0])
        card.settle()
        counts = {name: value for name, value in vars(card.stats).items() if isinstance(value, int)}
        return given_, counts, card._copies._booking._ledger.totals()["h2d"].bytes


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), prefetch=st.integers(0, 3), words=st.booleans())
def test_readers_copy_what_the_consumer_copied_and_the_card_decides_the_same(layouts: dict, seed: int, prefetch: int, words: bool) -> None:
    device = CarryingDevice(words=words)
    assert visited(layouts, device, seed, prefetch) == visited(layouts, FakeDevice(), seed, prefetch)
    assert device.carried and all(name.startswith("ssd-") for name in device.threads), "of the readers"


def missing(card: CardExperts, layer: int, count: int = 1) -> Routing:
    missed = [e for e in range(COUNT) if not card._dram.here(layer, e) and card._cache.slot(layer, e) is None]
    return Routing(np.array([missed[:count]]), prompt=False)


def test_a_copy_that_the_driver_refuses_fails_the_visit_in_words(layouts: dict) -> None:
    device, cache = CarryingDevice(), cache_of(LEAST, 0)
    with dram_tier(layouts, LEAST, 0, cache, True) as below:
        card = card_tier(layouts, LEAST, below, cache, device)
        card.start()
        device.refuses = 700
        with pytest.raises(RuntimeError, match="CUDA error: to queue a copy of what was read returned 700"):
            list(arrivals(card, 1, missing(card, 1), together=True))


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_host_is_woken_once_for_all_experts_of_a_visit(layouts: dict, interrupted: bool) -> None:
    """Kernels are launched then; the host hears of what came behind that. Where its sleep was ``interrupted`` it hears of it before."""
    device, cache = CarryingDevice(), cache_of(LEAST, 0)
    with dram_tier(layouts, LEAST, 0, cache, True) as below:
        card = card_tier(layouts, LEAST, below, cache, device)
        card.start()
        routing, pool, heard = missing(card, 1, 2), below._pool, list[bool]()
        bring, take = pool.bring, below._inbox.take
        parts = below.parts(1, routing.experts[0])
        held = Held(below._pool, parts[0][0].file)  # type: ignore[arg-type]
        assert len(parts) > 1

        def brings(brought: list[Any], *more: Any) -> Callable[[float], int | None]:
            assert len(brought) == 2
            come = bring(brought, *more)

            def slept(after_s: float) -> int | None:
                held.go.set()
                return None if interrupted else come(after_s)

            return slept

        def taken(*asked: Any) -> list[Any]:
            heard.append(True)
            return take(*asked)

        pool.bring, below._inbox.take = brings, taken  # type: ignore[method-assign]
        arrived = list(arrivals(card, 1, routing, together=True))
        assert bool(heard) == interrupted and device.waits == (not interrupted)
        card.catch_up()
        assert heard and below.stats.waits == 1 and not any(key[0] == 1 for key in below._fetches)
        while device.enabled():
            device.advance(device.enabled()[0])
        for one in arrived:
            check(1, *one)


def test_kernels_wait_once_for_what_the_host_copied_and_what_readers_carried_behind_it(layouts: dict) -> None:
    device, cache = CarryingDevice(), cache_of(LEAST, 0)
    with dram_tier(layouts, LEAST + len(LAYERS), 0, cache, True, ahead=0) as below:
        card = card_tier(layouts, LEAST, below, cache, device)
        card.start()
        device.finish("copies")
        near = next(e for e in range(COUNT) if below.here(1, e) and cache.slot(1, e) is None)
        (far,) = missing(card, 1).experts
        waits, wait = list[FakeEvent](), device.compute_waits

        def waiting(event: FakeEvent) -> None:
            waits.append(event)
            wait(event)

        device.compute_waits = waiting  # type: ignore[method-assign]
        held = Held(below._pool, below.parts(1, far)[0][0].file)  # type: ignore[arg-type]
        group = next(iter(card.groups(1, Routing(np.array([[near, far]]), prompt=False))))
        held.go.set()
        group.come()
        assert len(waits) == 1
        device.finish("compute")
        for one in group.arrived:
            check(1, *one)


def test_the_driver_is_not_asked_of_copies_that_a_router_came_behind(layouts: dict) -> None:
    """Neither before their slots of DRAM are written, nor to book them: what the router's choice was computed from waited for them."""
    device, cache = CarryingDevice(), cache_of(LEAST, 0)
    noted, asked = list[FakeEvent](), list[FakeEvent]()
    with dram_tier(layouts, LEAST, 0, cache, True, ahead=0) as below:
        card = card_tier(layouts, LEAST, below, cache, device)
        card.start()
        device.finish("copies")
        card.settle()
        note, done, waits = device.note_done, device.done, device.host_waits

        def noting(events: list[FakeEvent]) -> None:
            noted.extend(events)
            note(events)

        def asking(event: FakeEvent) -> bool:
            asked.append(event)
            return done(event)

        def waiting(event: FakeEvent) -> None:
            asked.append(event)
            waits(event)

        device.note_done, device.done, device.host_waits = noting, asking, waiting  # type: ignore[method-assign]
        for visit in range(8):
            layer = LAYERS[visit % len(LAYERS)]
            list(arrivals(card, layer, missing(card, layer, 2), together=True))
            card.catch_up()
            device.launch(lambda: None)  # the next router
            device.finish("compute")
        card._copies.computed()
        card.settle()
        assert len(asked) > 16 and all(any(event is one for one in noted) for event in asked)


def test_nothing_is_copied_behind_the_cards_end(layouts: dict) -> None:
    """Memory of the card may be somebody else's then: what is read still lands in DRAM."""
    device, cache = CarryingDevice(), cache_of(LEAST, 0)
    with dram_tier(layouts, LEAST, 0, cache, True) as below:
        card = card_tier(layouts, LEAST, below, cache, device)
        card.start()
        before, routing = device.carried, missing(card, 1)
        card.close()
        below.visit(1, routing, routing.experts, card._carrying)
        below.all_parts(1, routing.experts)
        assert device.carried == before
        _, buffer = below.place(1, routing.experts[0])
        assert torch.count_nonzero(buffer) > ALIGN


def test_kernels_are_queued_before_what_they_wait_for_is_read(layouts: dict) -> None:
    """The host sleeps when it comes to the next router, and for the last layer before it launches."""
    device, cache = CarryingDevice(words=True), cache_of(LEAST, 0)
    with dram_tier(layouts, LEAST + len(LAYERS), 0, cache, True, ahead=0) as below:
        card = card_tier(layouts, LEAST, below, cache, device)
        card.start()
        device.finish("copies")
        near = next(e for e in range(COUNT) if below.here(LAYERS[0], e) and cache.slot(LAYERS[0], e) is None)
        (far,) = missing(card, LAYERS[0]).experts
        held = Held(below._pool, below.parts(LAYERS[0], far)[0][0].file)  # type: ignore[arg-type]
        group = next(iter(card.groups(LAYERS[0], Routing(np.array([[near, far]]), prompt=False))))
        group.come()
        ran: list[int] = []
        for one in group.arrived:
            device.launch(lambda one=one: (check(LAYERS[0], *one), ran.append(one[0])))
        assert device.unread == 1 and not device.waits and not ran
        while device.enabled():
            device.advance(device.enabled()[0])
        assert not ran, "nothing was read"
        held.go.set()
        device.finish("compute")
        assert sorted(ran) == sorted((near, far))

    device, cache = CarryingDevice(words=True), cache_of(LEAST, 0)
    with dram_tier(layouts, LEAST, 0, cache, True) as below:
        card = card_tier(layouts, LEAST, below, cache, device)
        card.start()
        list(arrivals(card, LAYERS[-1], missing(card, LAYERS[-1]), together=True))
        assert not device.unread


@pytest.mark.parametrize("ends", ["refused", "unread", "closed"])
def test_kernels_wait_for_nothing_that_will_not_come(layouts: dict, ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver refuses, what cannot be read, what nobody copies any more: kernels go on, and the host is told."""

    def fails(*_: Any) -> int:
        raise OSError(errno.ENXIO, "played")

    device, cache = CarryingDevice(words=True), cache_of(LEAST, 0)
    with dram_tier(layouts, LEAST, 0, cache, True, ahead=0) as below:
        card = card_tier(layouts, LEAST, below, cache, device)
        card.start()
        device.finish("copies")
        routing, ran = missing(card, LAYERS[0]), list[bool]()
        held = Held(below._pool, below.parts(LAYERS[0], routing.experts[0])[0][0].file)  # type: ignore[arg-type]
        device.refuses = 700 if ends == "refused" else 0
        list(arrivals(card, LAYERS[0], routing, together=True))
        device.launch(lambda: ran.append(True))
        assert device.unread == 1
        if ends == "unread":
            monkeypatch.setattr(os, "preadv", fails)
        if ends == "closed":
            card.close()
            device.finish("compute")
        held.go.set()
        device.finish("compute")
        assert ran
        if ends != "closed":
            with pytest.raises((RuntimeError, OSError, UserError)):
                card.catch_up()
