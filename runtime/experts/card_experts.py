"""The VRAM tier of experts: slots on the card, and the copies that bring experts to them, some of them ahead of their router."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import length_hint

import torch

from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.runtime.experts.beside_card import Asked, BesideCard, Made
from penstock.runtime.experts.carried_experts import CarriedExperts
from penstock.runtime.experts.dram_experts import DramExperts
from penstock.runtime.experts.expert_copies import MOST_UNBOOKED, ExpertCopies, Pieces, Wanted
from penstock.runtime.experts.expert_fetch import Carrying, Key
from penstock.runtime.experts.expert_forward import Arrived, Group
from penstock.runtime.experts.expert_stats import Deciding, Judging, TierStats
from penstock.runtime.experts.host_experts import ComputeClock
from penstock.runtime.experts.products.expert_table import Lies
from penstock.runtime.experts.products.expert_views import SlotViews
from penstock.runtime.experts.visit_misses import Ahead, Misses
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.memory.pieces import cut
from penstock.runtime.moving.device_layout import DeviceLayout
from penstock.runtime.moving.ledger import Ledger


def _nothing() -> None:
    """Is left of a visit."""


class CardExperts:
    """Experts in VRAM ``slots`` under ``cache``, brought from ``dram``.

    A visit computes at once with the experts that are here. Experts in DRAM are copied next, those on the SSD as their parts arrive in
    DRAM. The host waits for parts from the SSD alone. Once the missing experts are in transit, VRAM decides what to keep and what to fetch
    ahead. DRAM decides next: it avoids what VRAM keeps.

    :meth:`visit` may miss more of DRAM than VRAM has slots while the SSD is read. What frees DRAM's slots is copied first then, so that
    the SSD reads on: what it has brought, then what is not to stay. For this the host also waits for copies.

    One token's visit leaves to :meth:`catch_up` what nothing waits for, if nothing waits for the SSD: to decide, to give slots back, to
    book copies. That happens while the card computes up to the next router.

    Where readers can queue copies, one that brings a part of a missed expert queues that part's, into a slot that the expert was given when
    the read was asked for. The host is woken when all has come.

    Copies have a stream of ``device`` to themselves. A missing expert waits there for no more than the ``in_flight`` chunks that
    :meth:`fetch_ahead` has queued. One thread does all this: a second one would take turns with it in the interpreter, chunk by chunk.
    """

    def __init__(
        self,
        layouts: Mapping[Key, DeviceLayout],
        slots: Sequence[torch.Tensor],
        cache: ExpertCache,
        dram: DramExperts,
        device: CopyDevice,
        clock: ComputeClock,
        ledger: Ledger,
        chunk_bytes: int,
        in_flight: int,
        beside: BesideCard | None = None,
    ):
        """``beside``: computes some of a decode step's missed experts where they lie in DRAM."""
        self.stats = TierStats()
        self._deciding, self._judging = Deciding(self.stats), Judging(self.stats)
        self._layouts, self._cache, self._dram = layouts, cache, dram
        calls = device.driver_calls()
        carrier = None if calls is None else dram.carrier(calls)
        self._copies = ExpertCopies(slots, device, ledger, carrier)
        self._device, self._clock, self._beside = device, clock, beside
        self._chunk_bytes, self._in_flight = chunk_bytes, in_flight
        self._coming: dict[Key, Ahead] = {}
        self._under_way: deque[Event] = deque()
        self._most_queued, self._most_bytes = float(in_flight), chunk_bytes
        self._ahead: set[Key] = set()
        self._wanted: Iterator[Key] | None = None
        self._views = SlotViews({key: layout.tensors for key, layout in layouts.items()})
        self._carried = CarriedExperts(layouts, self._copies, dram, carrier)
        self._carrying: Carrying = partial(self._carried.carry, self._take)
        self._behind: Callable[[], None] = _nothing
        """What is left of the latest visit."""

    def settle(self) -> None:
        """Book all copies that are over; never blocks."""
        self.catch_up()
        self._copies.settle()

    def catch_up(self) -> None:
        """Do what the latest visit has left."""
        behind, self._behind = self._behind, _nothing
        behind()

    def keep_first(self) -> dict[Key, torch.Tensor]:
        """The slots that layers keep, given to their first experts that DRAM does not keep: whoever calls this fills them before
        :meth:`start`."""
        places = {}
        for layer, expert in self._layouts:
            if self._dram.here(layer, expert):
                continue
            slot = self._cache.keep(layer, expert)
            if slot is not None:
                places[layer, expert] = self._copies.slots[slot]
        return places

    def start(self) -> None:
        """Fill from DRAM the slots that layers keep and that nobody filled, and wait for it. Meanwhile tensors are laid over all slots,
        some 60 us each: a step would wait for it."""
        held, over = {key: self._cache.slot(*key) for key in self._layouts}, None
        self._copies.lies_in(slot for slot in held.values() if slot is not None)
        for key in (key for key, slot in held.items() if slot is None and self._dram.here(*key)):
            slot = self._cache.keep(*key)
            if slot is not None:
                over = self._copy([self._whole(key, slot)])
        self._carried.prepare()
        for slot, buffer in enumerate(self._copies.slots):
            Lies.of(self._views.of(next(iter(self._layouts)), slot, buffer))
        if over is not None:
            self._device.host_waits(over)

    def close(self) -> None:
        """Nothing is fetched ahead any more: whoever computes on does it without this tier, and passes by."""
        self._wanted, self._behind = None, _nothing
        self._coming.clear()
        self._carried.close()

    def route(self, index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self._beside is not None:
            self._beside.take(hidden)
        self.catch_up()
        self.fetch_ahead()
        return index

    def visit(self, layer: int, routing: Routing) -> Iterator[Arrived | Made]:
        hits, coming = self._begin(layer, routing, at_once=1)
        self._decide(layer, coming, routing)
        if coming.near and coming.far:
            coming.near = deque(self._dram.leaving_first(layer, coming.near))
        for expert in hits:
            yield from self._ready(layer, (expert,))[1]
            self._used(layer, (expert,))
        while coming.near or coming.started:
            if coming.near and coming.far:
                self._put_arrived_first(layer, coming)
            self._go_on(layer, coming, routing)
            expert = coming.started.popleft()
            if coming.near and coming.far:
                self._await(layer, expert)
            yield from self._ready(layer, (expert,))[1]
            self._used(layer, (), (expert,))
        while coming.far:
            arrived = self._bring_part(layer, coming)
            if arrived is not None:
                yield from self._ready(layer, (arrived,))[1]
                self._used(layer, (), (arrived,))
        yield from self._made(layer, coming)
        self.settle()

    def groups(self, layer: int, routing: Routing) -> Iterator[Group]:
        """As many together as there are slots for: those that were here, those that come from DRAM, and those from the SSD: each further
        group takes the host as long to launch as the first. What the CPU computes comes with the last.

        Where all have slots, and readers copy what the SSD brings, they are one group before that has come: the host prepares their launch
        while the drive reads.
        """
        here, coming = self._begin(layer, routing, at_once=len(self._copies.slots))
        came: list[int] = []
        if not coming.near and coming.far.keys() <= coming.carried.keys():
            came = [*coming.started, *coming.far]
            if coming.far and (self._cache.looks_ahead or self._dram.looks_ahead):
                self._decide(layer, coming, routing)
            slots, arrived = self._placed(layer, (*here, *came))
            yield self._group(arrived, coming.asked, partial(self._come, layer, coming, slots, len(here)))
            assert not coming.far, "whoever computes with a group has it come"
            self._copies.left(slots)
            self._behind = partial(self._end, layer, coming, routing, here, came)
            return
        self._decide(layer, coming, routing)
        while here or coming.near or coming.started or coming.far:
            self._go_on(layer, coming, routing)
            came = [*coming.started]
            coming.started.clear()
            if coming.far:
                came += self._brought(layer, coming, bool(here or came))
            more = bool(coming.near or coming.far)
            slots, arrived = self._ready(layer, here, came)
            yield self._group(arrived, () if more else coming.asked)
            self._copies.left(slots)
            if not more:
                break
            self._let_go(layer, here, came)
            here = came = []
        self._behind = partial(self._end, layer, coming, routing, here, came)

    def _group(self, arrived: Sequence[Arrived], asked: Sequence[Asked], come: Callable[[], object] = tuple) -> Group:
        beside = self._beside
        return Group(arrived, len(asked), partial(beside.made, asked) if beside is not None and asked else tuple, come)

    def _come(self, layer: int, coming: Misses, slots: Sequence[int], here: int) -> None:
        """All of a visit's experts, which have ``slots``, the first of them ``here``: kernels issued from now on find them."""
        if coming.far:
            self._clock.idle()
            self._all_came(layer, coming)
        self._arrive(slots, here, self._clock.idle)

    def _all_came(self, layer: int, coming: Misses) -> list[int]:
        """Wait for all that readers bring of the SSD, and have to copy."""
        came = [*coming.far]
        self._dram.all_parts(layer, coming.far, self._meanwhile)
        coming.far.clear()
        self._carried.all_came(layer, {expert: coming.carried[expert] for expert in came})
        return came

    def _end(self, layer: int, coming: Misses, routing: Routing, here: Sequence[int], came: Sequence[int]) -> None:
        """What a visit leaves to :meth:`catch_up`: its last experts were ``here``, or ``came``."""
        if not coming.decided:
            self._decide(layer, coming, routing)
        self._let_go(layer, here, came)
        self._dram.release(layer, [one.expert for one in coming.asked])
        if self._copies.unbooked >= MOST_UNBOOKED or self._cache.is_last(layer):
            self._copies.settle()

    def _brought(self, layer: int, coming: Misses, others: bool) -> list[int]:
        """Wait for the SSD: for all that it still has to bring, where each has its slots; else for one, unless ``others`` are to be
        computed with and will leave some."""
        came: list[int] = []
        if not coming.near and coming.far.keys() <= coming.carried.keys():
            self._clock.pause()
            return self._all_came(layer, coming)
        placeless = [expert for expert in coming.far if self._cache.slot(layer, expert) is None]
        together = not coming.near and len(placeless) <= self._cache.free and self._dram.all_asked
        if together:
            for expert in placeless:
                self._take(layer, expert)
        while coming.far and (together or not (others or came)):
            arrived = self._bring_part(layer, coming)
            came += [] if arrived is None else [arrived]
        return came

    def _begin(self, layer: int, routing: Routing, at_once: int) -> tuple[Sequence[int], Misses]:
        """Queue what is missing. Returns what is here, first what needs no more copies, and what is not. The router's choice was read back:
        whatever was computed with slots is over."""
        self.catch_up()
        self._copies.computed()
        self._wanted = None
        with self._deciding:
            seen = self._cache.find(layer, routing.experts)
        for slot in seen.dropped:
            self._cache.give_back(slot)
        begun = {key: self._coming.pop(key) for key in [*self._coming] if key[0] == layer} if self._coming else {}
        partly = [e for e in seen.hits if (layer, e) in begun]
        for expert in partly:
            self._queue(begun[layer, expert], len(begun[layer, expert].chunks))
        carrying = self._carrying if self._carried.possible and len(seen.misses) <= self._cache.free else None
        near, far = self._dram.visit(layer, routing, seen.misses, carrying)
        carried = self._carried.begun()
        if far:
            self._dram.begun()
        asked = self._begin_beside(layer, routing, near)
        if asked:
            elsewhere = {one.expert for one in asked}
            self._dram.set_aside(elsewhere)
            near = [e for e in near if e not in elsewhere]
        coming = Misses(deque(near), dict.fromkeys(far), at_once=at_once, carried=carried, asked=asked)
        self._start(layer, coming)
        self.stats.visited(routing.prompt, len(seen.hits), len(seen.misses))
        if self._ahead:
            self.stats.ahead_used += len([e for e in seen.hits if (layer, e) in self._ahead])
            self._ahead = {key for key in self._ahead if key[0] != layer}
        return [*(e for e in seen.hits if e not in partly), *partly], coming

    def _start(self, layer: int, coming: Misses) -> None:
        """Queue the copies of what lies in DRAM, as far as there are slots."""
        while coming.near and self._cache.free:
            taken = [coming.near.popleft() for _ in range(min(len(coming.near), self._cache.free, coming.at_once))]
            self._copy([self._whole((layer, expert), self._take(layer, expert)) for expert in taken])
            coming.started.extend(taken)

    def _begin_beside(self, layer: int, routing: Routing, near: Sequence[int]) -> Sequence[Asked]:
        """The CPU's share of the missed experts that lie in DRAM, which it begins before the first copy is queued."""
        if self._beside is None or not near:
            return ()
        places = {expert: self._dram.place(layer, expert) for expert in near}
        asked = self._beside.begin(layer, routing, places, self._copies.queued_bytes())
        for one in asked:
            self._dram.read_until([places[one.expert][0]], one.wait)
        return asked

    def _put_arrived_first(self, layer: int, coming: Misses) -> None:
        """Experts that the SSD has brought go before those that lay in DRAM: it reads on into the slots that they leave. Readers carry none
        of them on: they do where all that is missed has slots, and then nothing in DRAM waits for one."""
        came = self._dram.all_there(layer, coming.far, self._cache.free)
        for expert in came:
            del coming.far[expert]
        coming.near.extendleft(reversed(came))

    def _await(self, layer: int, expert: int) -> None:
        """Return when ``expert`` has arrived. Else the host would queue all of DRAM's copies at once, and what is read meanwhile would be
        copied behind them."""
        (slot,) = self._cache.slots(layer, (expert,))
        arrival = self._copies.arriving(slot)
        if arrival is not None:
            self._clock.pause()
            self._device.host_waits(arrival)

    def _made(self, layer: int, coming: Misses) -> Iterator[Made]:
        """What the CPU computes, for kernels issued from now on."""
        if coming.asked and self._beside is not None:
            yield from self._beside.made(coming.asked)
            self._dram.release(layer, [one.expert for one in coming.asked])

    def _decide(self, layer: int, coming: Misses, routing: Routing) -> None:
        """In both tiers: what is to stay, and what may come ahead."""
        coming.decided = True
        if not self._cache.still:
            with self._judging:
                self._cache.judge(layer, routing)
        self._dram.judge(layer, routing)
        self._go_on(layer, coming, routing)

    def _go_on(self, layer: int, coming: Misses, routing: Routing) -> None:
        """Queue what there are slots for; behind the last that DRAM has, copies for coming layers may begin, also while the SSD reads."""
        if coming.near:
            self._start(layer, coming)
        if coming.decided and not (coming.near or coming.looked_ahead):
            coming.looked_ahead = True
            self._look_ahead(layer, len(routing.experts))

    def _bring_part(self, layer: int, coming: Misses) -> int | None:
        """Wait for parts of an expert from the SSD, for which there is a slot, and queue their copies. The expert, if that was the last."""
        self._clock.pause()
        wanted = coming.far if self._cache.free else [e for e in coming.far if self._cache.slot(layer, e) is not None]
        expert, numbers, over = self._dram.next_parts(layer, wanted, self._meanwhile)
        carried = coming.carried.get(expert)
        if carried is None:
            segments = [segment for number in numbers for segment in self._carried.segments_of((layer, expert), number)]
            slot = self._cache.slot(layer, expert)
            if slot is None:
                slot = self._take(layer, expert)
            self._copy([Wanted((layer, expert), slot, *self._dram.place(layer, expert), Pieces.of(segments))])
        elif over:
            self._carried.all_came(layer, {expert: carried})
        if not over:
            return None
        del coming.far[expert]
        return expert

    def _ready(self, layer: int, here: Sequence[int], came: Sequence[int] = ()) -> tuple[Sequence[int], Sequence[Arrived]]:
        """Slots of experts that were ``here`` and that ``came`` just now, and they, for kernels issued from now on: these wait until all
        have arrived. Of what came nobody asks whether it has: the answer takes the host longer than to have the card wait."""
        slots, arrived = self._placed(layer, (*here, *came))
        self._arrive(slots, len(here), self._clock.pause)
        return slots, arrived

    def _arrive(self, slots: Sequence[int], here: int, pause: Callable[[], None]) -> None:
        late = None
        before = [arrival for arrival in self._copies.arrivals(slots[:here]) if not self._device.done(arrival)]
        for arrival in (*before, *self._copies.arrivals(slots[here:])):
            if late is None:
                pause()
            self._device.compute_waits(arrival)
            late = arrival
        self._clock.resume(late)

    def _placed(self, layer: int, experts: Sequence[int]) -> tuple[Sequence[int], Sequence[Arrived]]:
        """The slots of ``experts``, and they as kernels find them there."""
        slots, views, buffers = self._cache.slots(layer, experts), self._views.of, self._copies.slots
        return slots, [(e, views((layer, e), slot, buffers[slot])) for e, slot in zip(experts, slots, strict=True)]

    def _used(self, layer: int, here: Sequence[int], came: Sequence[int] = ()) -> None:
        """What computes with experts that were ``here``, and with those that ``came`` from DRAM, is issued."""
        self._copies.left(self._cache.slots(layer, (*here, *came)))
        self._let_go(layer, here, came)

    def _let_go(self, layer: int, here: Sequence[int], came: Sequence[int]) -> None:
        """Of these, what is not to stay."""
        self._carried.settle()
        for slot in self._cache.settle_all(layer, (*here, *came)):
            self._cache.give_back(slot)
        self.fetch_ahead()
        self._dram.release(layer, came)

    def _take(self, layer: int, expert: int) -> int:
        slot = self._cache.take(layer, expert)
        if slot is None:
            raise RuntimeError(f"no slot for expert {layer}.{expert}")
        return slot

    def _whole(self, key: Key, slot: int) -> Wanted:
        return Wanted(key, slot, *self._dram.place(*key), self._carried.whole(key))

    def _copy(self, wanted: Sequence[Wanted]) -> Event:
        over = self._copies.copy(wanted)
        self._dram.read_until([one.dram_slot for one in wanted], partial(self._device.host_waits, over))
        return over

    def _look_ahead(self, layer: int, touched: int) -> None:
        if self._cache.still:
            return
        with self._deciding:
            wanted = self._cache.coming(layer, touched)
        self._wanted = wanted if length_hint(wanted, 1) else None
        if not self._fetches_ahead:
            return
        certain = self._cache.is_dense(touched) and not self._cache.is_last(layer)  # the pass after this one may be a step
        self._most_queued, self._most_bytes = (math.inf, sys.maxsize) if certain else (self._in_flight, self._chunk_bytes)
        self.fetch_ahead()

    def fetch_ahead(self) -> None:
        """Queue chunks of prefetched experts while fewer than ``in_flight`` are in flight. If the coming layer needs all its experts, queue
        as many as have slots, each in one piece. Never blocks; called wherever the host passes by."""
        if not self._fetches_ahead:
            return
        while self._under_way and self._device.done(self._under_way[0]):
            self._under_way.popleft()
        while len(self._under_way) < self._most_queued:
            coming = self._next_ahead()
            if coming is None:
                return
            self._under_way.append(self._queue(coming, 1))
            if not coming.chunks:
                del self._coming[coming.key]

    @property
    def _fetches_ahead(self) -> bool:
        """Whether anything may still be fetched ahead."""
        return self._wanted is not None or bool(self._coming)

    @property
    def _meanwhile(self) -> Callable[[], None] | None:
        """What is to be done again and again while the host waits for the SSD, which gives no slot back; None for nothing."""
        return self.fetch_ahead if self._coming or (self._wanted is not None and self._cache.room_ahead) else None

    def _next_ahead(self) -> Ahead | None:
        """What is being fetched ahead, or else the next that can be: it lies in DRAM, and a demand would still find a slot."""
        for coming in self._coming.values():
            return coming
        while self._wanted is not None and self._cache.room_ahead:
            with self._deciding:
                key = next(self._wanted, None)
            if key is None:
                self._wanted = None
            elif self._dram.here(*key):
                self.stats.fetched_ahead()
                self._ahead.add(key)
                dram_slot, source = self._dram.place(*key)
                chunks = deque(cut(self._layouts[key].segments, self._most_bytes))
                slot = self._cache.take(*key)
                assert slot is not None, "there was room ahead"
                self._coming[key] = Ahead(key, slot, dram_slot, source, chunks)
                return self._coming[key]
        return None

    def _queue(self, coming: Ahead, most: int) -> Event:
        chunks = [coming.chunks.popleft() for _ in range(most)]
        return self._copy([Wanted(coming.key, coming.slot, coming.dram_slot, coming.source, Pieces.of(chunks))])
