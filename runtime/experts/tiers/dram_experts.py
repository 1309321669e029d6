"""The DRAM tier of experts: slots in the arena, and reads that bring experts to them part by part."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import length_hint
from typing import Generic, NamedTuple, TypeVar

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import align_up
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.runtime.experts.tiers.expert_fetch import Carrying, Fetch, Key, parts_of
from penstock.runtime.experts.tiers.expert_stats import Deciding, Judging, TierStats
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.bare_copies import DriverCalls
from penstock.runtime.moving.filler import Arrival
from penstock.runtime.reading.native.native_carrier import NativeCarrier
from penstock.runtime.reading.native.native_order import Brought, Come, Order
from penstock.runtime.reading.pending import Done
from penstock.runtime.reading.reader import Reads, UrgentReads
from penstock.runtime.reading.reads_inbox import Inbox, Ticket
from penstock.runtime.store.base import Extent, UnitLayout

T = TypeVar("T")
LOOK_UP_S = 0.004
"""How long a wait for the SSD goes on at a time: a link of 16 to 64 GB/s copies one or two chunks meanwhile."""


class Came(NamedTuple):
    """What has arrived of ``expert``: numbers of its ``parts``, and whether that is all of it."""

    expert: int
    parts: Sequence[int]
    over: bool


class _Made(dict[int, T], Generic[T]):
    """What ``make`` gives for a slot, made once."""

    def __init__(self, make: Callable[[int], T]):
        super().__init__()
        self._make = make

    def __missing__(self, slot: int) -> T:
        made = self[slot] = self._make(slot)
        return made


def _nothing(after_s: float) -> None:
    """Was asked for."""


class DramExperts:
    """Experts in ``slots`` of the arena from ``base`` on, under ``cache``.

    One consumer calls :meth:`visit`, :meth:`judge`, :meth:`next_parts` and :meth:`release`; reads complete on the reader's threads. Missing
    experts are read at once, before all else. Prefetched experts have at most ``in_flight`` parts in flight. A prefetch stops at the next
    visit that has no use for it.
    """

    def __init__(
        self,
        layouts: Mapping[Key, UnitLayout],
        arena: Arena,
        base: int,
        cache: ExpertCache,
        pool: UrgentReads,
        part_bytes: int,
        in_flight: int,
    ):
        self.stats = TierStats()
        self._deciding, self._judging = Deciding(self.stats), Judging(self.stats)
        self.slot_bytes = slot_bytes(layouts)
        self._layouts, self._pool = layouts, pool
        self._cache = cache
        self._part_bytes, self._in_flight = part_bytes, in_flight
        self._lock = threading.RLock()
        self._inbox: Inbox[tuple[Fetch, int] | None] = pool.inbox()
        """Of parts that were demanded; None where something else is to be looked at."""
        self._fetches: dict[Key, Fetch] = {}
        self._todo: deque[Key] = deque()
        self.come: Come = _nothing
        """Of what readers were asked last to carry; :meth:`all_parts` of it is still to be called, and then returns at once."""
        self._buffers = _Made(lambda slot: arena.slice(base + slot * self.slot_bytes, self.slot_bytes))
        self._views = _Made(lambda slot: arena.view[base + slot * self.slot_bytes : base + (slot + 1) * self.slot_bytes])
        self.begins_at = arena.address + base
        """Where the first slot lies; the next one :attr:`slot_bytes` behind it."""
        self._parts: dict[Key, list[tuple[Extent, ...]]] = {}
        self._left: dict[int, Callable[[], None]] = {}
        """Waits for the copies that read a slot last."""
        self._ahead: set[Key] = set()
        self._wanted: Iterator[Key] | None = None
        """What may be fetched ahead, since the latest :meth:`judge`."""
        self._error: BaseException | None = None
        self._closed = False

    def preload(self, source: Reads) -> list[tuple[Arrival, int]]:
        """Start to fill the slots that layers keep, from ``source``: (arrival, bytes) of each expert. Meanwhile all reads that may be asked
        for are prepared, some 30 us each, and all slots, 7 us each: a step would wait for it."""
        under_way = []
        for free in range(self._cache.free):
            self._buffers[free], self._views[free]
        for (layer, expert), layout in self._layouts.items():
            slot = self._cache.keep(layer, expert)
            if slot is not None:
                under_way.append((Arrival(), layout.payload_bytes))
                source.read(layout.extents, self._views[slot], under_way[-1][0], f"expert {layer}.{expert}")
        if not self._cache.still:
            for key in self._layouts:
                self._pool.expect(self.parts(*key), self.slot_bytes)
        return under_way

    @property
    def still(self) -> bool:
        """Whether all experts lie here and stay."""
        return self._cache.still

    @property
    def looks_ahead(self) -> bool:
        """See :class:`penstock.planner.contract.experts.expert_cache.ExpertCache`."""
        return self._cache.looks_ahead

    @property
    def keys(self) -> Sequence[Key]:
        """All experts there are."""
        return tuple(self._layouts)

    def read_into(self, key: Key, slot: int, done: Callable[[BaseException | None], None]) -> None:
        """Start reading an expert into ``slot``, whatever lies there and is known of it: before anything is loaded, or after the end."""
        self._pool.read(self._layouts[key].extents, self._views[slot], done, "expert {}.{}".format(*key))

    def visit(
        self, layer: int, routing: Routing, wanted: Sequence[int], carrying: Carrying | None = None
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Begin a visit: ``layer`` computes with ``routing``'s experts, ``wanted`` of them from this tier. Returns those that are here, to
        be used in this order, and those in transit. Misses are read as far as there are slots. Call :meth:`judge` next. ``carrying`` is
        asked for each of them before it is read."""
        if self._cache.still:
            self._raise_if_broken()
            self.stats.visited(routing.prompt, len(wanted), 0)
            return wanted, ()
        with self._lock:
            self._raise_if_broken()
            seen = self._cache.find(layer, wanted)
            self.stats.visited(routing.prompt, len(seen.hits), len(seen.misses))
            if seen.dropped:
                under_way = {fetch.slot: fetch for fetch in self._fetches.values()}
                for slot in seen.dropped:
                    self._drop(slot, under_way.get(slot))
            if self._ahead:
                self.stats.ahead_used += len({(layer, e) for e in seen.hits} & self._ahead)
                self._ahead = {key for key in self._ahead if key[0] != layer}
            self._wanted = None
            here = seen.hits
            if self._fetches:
                coming = [expert for expert in here if (layer, expert) in self._fetches]
                here = tuple([expert for expert in here if expert not in coming])
                for expert in coming:
                    fetch = self._fetches[layer, expert]
                    fetch.demanded = True
                    self._submit(fetch)
            else:
                coming = []
            self._todo += [(layer, expert) for expert in seen.misses]
            if self._todo:
                self._start_demanded(carrying)
            return here, (*coming, *seen.misses)

    def set_aside(self, experts: Collection[int]) -> None:
        """See :class:`penstock.planner.contract.experts.expert_cache.ExpertCache`."""
        self._cache.set_aside(experts)

    def carrier(self, calls: DriverCalls) -> NativeCarrier | None:
        """See :class:`penstock.runtime.reading.reader.UrgentReads`."""
        return self._pool.carrier(calls)

    def order(self, key: Key, segments: Sequence[array[int]]) -> Order[Sequence[Extent]]:
        """Likewise, of all parts of an expert."""
        return self._pool.order("expert {}.{}".format(*key), self.parts(*key), self.slot_bytes, segments)

    def begun(self) -> None:
        """Return when what was missed is being read, as far as slots and the drive's queue have room."""
        self._pool.begun()

    @property
    def all_asked(self) -> bool:
        """Whether everything missed has a slot and its reads are queued."""
        with self._lock:
            return not self._todo

    def judge(self, layer: int, routing: Routing) -> None:
        """Decide what is to stay after the visit, and begin to fetch ahead for the layer after it."""
        if self._cache.still:
            return
        with self._lock:
            with self._judging:
                self._cache.judge(layer, routing)
                wanted = self._cache.coming(layer, len(routing.experts))
            self._wanted = wanted if length_hint(wanted, 1) else None
            self._go_on()

    def here(self, layer: int, expert: int) -> bool:
        """Whether all of it lies in its slot."""
        with self._lock:
            self._raise_if_broken()
            return self._cache.slot(layer, expert) is not None and (layer, expert) not in self._fetches

    def place(self, layer: int, expert: int) -> tuple[int, torch.Tensor]:
        """(slot, its uint8 buffer) of an expert that is here or on its way."""
        slot = self._cache.slot(layer, expert)
        assert slot is not None, "it has one while it is here or on its way"
        return slot, self._buffers[slot]

    def places(self, layer: int, experts: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        """:meth:`place` of each of ``experts``."""
        return [(slot, self._buffers[slot]) for slot in self._cache.slots(layer, experts)]

    def slots(self, layer: int, experts: Sequence[int]) -> list[int]:
        """The slots of ``experts``, which are here or on their way."""
        return self._cache.slots(layer, experts)

    def buffer(self, slot: int) -> torch.Tensor:
        """The bytes of ``slot``, uint8."""
        return self._buffers[slot]

    def parts(self, layer: int, expert: int) -> list[tuple[Extent, ...]]:
        """What :meth:`next_parts` numbers."""
        if (layer, expert) not in self._parts:
            self._parts[layer, expert] = parts_of(self._layouts[layer, expert], self._part_bytes)
        return self._parts[layer, expert]

    def read_until(self, slots: Sequence[int], wait: Callable[[], None]) -> None:
        """Copies that read ``slots`` are queued; ``wait`` returns once they are over. Not where this tier is :attr:`still`."""
        with self._lock:
            self._left |= dict.fromkeys(slots, wait)

    def next_parts(self, layer: int, experts: Collection[int], meanwhile: Callable[[], None] | None = None) -> Came:
        """Wait until one of ``experts``, all on their way, or a part of it, has arrived. Calls ``meanwhile`` again and again until then."""
        self._hear(0.0)
        came = self._arrived(layer, experts)
        if came is not None:
            return came
        begun = time.perf_counter()
        while True:
            self._hear(1.0 if meanwhile is None else LOOK_UP_S)
            came = self._arrived(layer, experts)
            if came is not None:
                break
            if meanwhile is not None:
                meanwhile()
        self.stats.waits += 1
        self.stats.wait_s += time.perf_counter() - begun
        return came

    def all_parts(self, layer: int, experts: Collection[int], meanwhile: Callable[[], None] | None = None, waited_s: float = 0.0) -> None:
        """Wait until ``experts``, all on their way and carried on, have arrived. Calls ``meanwhile`` again and again until then. The
        thread is woken once, when the last of them has come: whatever it does then it does with cold caches. ``waited_s``: how long it
        has waited for them before."""
        fetches = [self._fetches[layer, expert] for expert in experts]
        begun = time.perf_counter() - waited_s
        while left := sum([fetch.left for fetch in fetches]):
            self._hear(1.0 if meanwhile is None else LOOK_UP_S, left)
            if meanwhile is not None:
                meanwhile()
        self.stats.waits += 1
        self.stats.wait_s += time.perf_counter() - begun
        with self._lock:
            self._raise_if_broken()
            for fetch in fetches:
                del self._fetches[fetch.key]

    def arrived(self, layer: int, experts: Collection[int]) -> int | None:
        """One of ``experts``, all on their way, of which the last part has arrived; never blocks."""
        self._hear(0.0)
        while (came := self._arrived(layer, experts)) is not None:
            if came.over:
                return came.expert
        return None

    def all_there(self, layer: int, experts: Collection[int], most: int) -> list[int]:
        """Up to ``most`` of ``experts``, all on their way, of which every part has arrived and :meth:`next_parts` has given none. The first
        asked for come first. Never blocks."""
        self._hear(0.0)
        with self._lock:
            self._raise_if_broken()
            came = [key for key, fetch in self._fetches.items() if not fetch.left and key[0] == layer and key[1] in experts]
            for key in came[:most]:
                del self._fetches[key]
            return [expert for _, expert in came[:most]]

    @property
    def held_up(self) -> bool:
        """See :class:`penstock.planner.contract.experts.expert_cache.ExpertCache`."""
        with self._lock:
            return self._cache.held_up

    def leaving_first(self, layer: int, experts: Sequence[int]) -> list[int]:
        """``experts`` that are here, in the order in which their use frees slots, as decided by :meth:`judge`."""
        with self._lock:
            return self._cache.leaving_first(layer, experts)

    def _hear(self, most_s: float, least: int = 1) -> None:
        """Note what has arrived; waits for ``least`` parts of it for so many seconds at most."""
        heard = self._inbox.take(most_s, least)
        if heard:
            with self._lock:
                for key, error in heard:
                    if key is not None:
                        self._over(*key, error)
                self._raise_if_broken()

    def _arrived(self, layer: int, experts: Collection[int]) -> Came | None:
        with self._lock:
            self._raise_if_broken()
            for expert in experts:
                fetch = self._fetches.get((layer, expert))
                if fetch is not None and fetch.arrived:
                    parts, fetch.arrived = fetch.arrived, []
                    if not fetch.left:
                        del self._fetches[fetch.key]
                    return Came(expert, parts, not fetch.left)
            return None

    def release(self, layer: int, experts: Sequence[int]) -> None:
        """The consumer is through with them, but for copies that :meth:`read_until` named."""
        if self._cache.still or not experts:
            return
        with self._lock:
            for slot in self._cache.settle_all(layer, experts):
                self._cache.give_back(slot)
            self._go_on()

    def close(self) -> None:
        """Wake the consumer with an error; reads in flight are the reader's to end."""
        with self._lock:
            self._closed = True
        self._inbox.put(None)

    def _go_on(self) -> None:
        """Start what was asked for, then what may be next, as far as there are slots."""
        if not self._start_demanded():
            return
        while self._wanted is not None and self._cache.room_ahead:
            with self._deciding:
                key = next(self._wanted, None)
            if key is None:
                self._wanted = None
                return
            self._begin(key, False, [])
            self._ahead.add(key)
            self.stats.fetched_ahead()

    def _start_demanded(self, carrying: Carrying | None = None) -> bool:
        """Whether all that was asked for is here or on its way."""
        brought: list[Brought[tuple[Fetch, int] | None]] = []
        try:
            while self._todo and self._begin(self._todo[0], True, brought, carrying):
                self._todo.popleft()
        finally:
            if brought:
                self.come = self._pool.bring(brought, self._inbox)
        return not self._todo

    def _begin(self, key: Key, demanded: bool, brought: list[Brought[tuple[Fetch, int] | None]], carrying: Carrying | None = None) -> bool:
        """Whether there was a slot for it. What readers carry is added to ``brought``; the rest is asked for."""
        slot = self._cache.take(*key)
        if slot is None:
            return False
        if slot in self._left:
            self._left.pop(slot)()
        order = None if carrying is None else carrying(key, slot)
        if order is None:
            parts = self.parts(*key)
            fetch = self._fetches[key] = Fetch(key, slot, parts, len(parts), demanded=demanded)
            self._submit(fetch)
        else:
            fetch = self._fetches[key] = Fetch(key, slot, order.parts, 1, len(order.parts), 1, demanded)
            brought.append((order, (fetch, 0), self._views[slot], self.begins_at + slot * self.slot_bytes))
        return True

    def _submit(self, fetch: Fetch) -> None:
        if fetch.dropped:
            return
        left = len(fetch.parts) - fetch.submitted
        count = left if fetch.demanded else min(left, self._in_flight - fetch.under_way)
        if count <= 0:
            return
        numbers = range(fetch.submitted, fetch.submitted + count)
        fetch.submitted += count
        fetch.under_way += count
        dones: list[Done]
        if fetch.demanded:
            dones = [Ticket(self._inbox, (fetch, number)) for number in numbers]
        else:
            dones = [partial(self._landed, fetch, number) for number in numbers]
        layer, expert = fetch.key
        parts = fetch.parts[numbers.start : numbers.stop]
        self._pool.read_each(parts, self._views[fetch.slot], dones, f"expert {layer}.{expert}", urgent=fetch.demanded)

    def _landed(self, fetch: Fetch, number: int, error: BaseException | None) -> None:
        """A part that was not demanded, on the reading thread."""
        with self._lock:
            self._over(fetch, number, error)
            awaited = fetch.demanded or error is not None
        if awaited:
            self._inbox.put(None)

    def _over(self, fetch: Fetch, number: int, error: BaseException | None) -> None:
        fetch.under_way -= 1
        fetch.left -= 1
        fetch.arrived.append(number)
        if error is not None:
            self._error = error
        elif not fetch.dropped:
            if fetch.submitted < len(fetch.parts):
                self._submit(fetch)
        elif not fetch.under_way:
            self._cache.give_back(fetch.slot)
            self._start_demanded()

    def _drop(self, slot: int, fetch: Fetch | None) -> None:
        if fetch is not None:
            fetch.dropped = True
            del self._fetches[fetch.key]
        if fetch is None or not fetch.under_way:
            self._cache.give_back(slot)

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise UserError("the weight stream was stopped")


def slot_bytes(layouts: Mapping[Key, UnitLayout]) -> int:
    """One slot: it fits every expert."""
    return max((align_up(layout.nbytes) for layout in layouts.values()), default=0)
