"""The VRAM tier of experts: a layer's visit to what lies on the card, what comes there, and what the CPU computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile

import torch

from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.runtime.experts.expert_forward import Arrived, Fit, Group
from penstock.runtime.experts.host_experts import ComputeClock
from penstock.runtime.experts.products.beside_card import Asked, BesideCard, Made
from penstock.runtime.experts.tiers.card_slots import CardSlots
from penstock.runtime.experts.tiers.copies_ahead import CopiesAhead
from penstock.runtime.experts.tiers.dram_experts import DramExperts
from penstock.runtime.experts.tiers.expert_copies import MOST_UNBOOKED, Pieces
from penstock.runtime.experts.tiers.expert_fetch import Carrying, Key
from penstock.runtime.experts.tiers.expert_stats import Deciding, Judging, TierStats
from penstock.runtime.experts.visit_misses import Misses
from penstock.runtime.memory.device import CopyDevice
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

    If VRAM has a slot for each expert that a visit misses, each gets it before anything is fetched ahead. Where readers can queue copies,
    one that brings a part of such an expert queues that part's. Kernels of one token then wait for these copies before they are queued: the
    host launches on up to the next router, and sleeps in :meth:`catch_up` until all has come. For the last layer of a pass it sleeps before
    it launches: so a read that failed ends the pass before anything of it is told.

    Copies have a stream of ``device`` to themselves. One thread does all this: a second one would take turns with it in the interpreter,
    chunk by chunk.
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
        self._cache, self._dram, self._device, self._clock, self._beside = cache, dram, device, clock, beside
        self._slots = CardSlots(layouts, slots, cache, dram, device, ledger)
        self._copies, self._carried = self._slots.copies, self._slots.carried
        self._carrying: Carrying | None = partial(self._carried.carry, cache.take) if self._carried.possible else None
        self._looks_ahead = cache.looks_ahead or dram.looks_ahead
        self._ahead = CopiesAhead(layouts, cache, dram, device, self._slots.copy, self.stats, chunk_bytes, in_flight)
        self._behind: Callable[[], None] = _nothing
        """What is left of the latest visit."""

    def settle(self) -> None:
        """Book all copies that are over; never blocks."""
        self.catch_up()
        self._copies.settle()

    def catch_up(self) -> None:
        """Do what the latest visit has left."""
        behind = self._behind
        if behind is not _nothing:
            self._behind = _nothing
            behind()

    def keep_first(self) -> dict[Key, torch.Tensor]:
        """See :class:`penstock.runtime.experts.tiers.card_slots.CardSlots`."""
        return self._slots.keep_first()

    def start(self) -> None:
        """See :class:`penstock.runtime.experts.tiers.card_slots.CardSlots`."""
        self._slots.start()

    def close(self) -> None:
        """Nothing is fetched ahead any more: whoever computes on does it without this tier, and passes by."""
        self._behind = _nothing
        self._ahead.close()
        self._carried.close()

    def route(self, index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self._beside is not None:
            self._beside.take(hidden)
        self.catch_up()
        self.fetch_ahead()
        return index

    def visit(self, layer: int, routing: Routing, fit: Fit) -> Iterator[Sequence[Arrived | Made]]:
        hits, coming = self._begin(layer, routing, at_once=1)
        self._decide(layer, coming, routing)
        if coming.near and coming.far:
            coming.near = deque(self._dram.leaving_first(layer, coming.near))
        while hits:
            there = self._there(layer, hits, fit)
            together, hits = hits[:there], hits[there:]
            yield self._ready(layer, together)[1]
            self._used(layer, together)
        while coming.near or coming.started:
            if coming.near and coming.far:
                self._put_arrived_first(layer, coming)
            self._go_on(layer, coming, routing)
            if coming.near and coming.far:
                self._await(layer, coming.started[0])
            came = [coming.started.popleft() for _ in range(self._there(layer, coming.started, fit))]
            yield self._ready(layer, came)[1]
            self._used(layer, (), came)
        while coming.far:
            self._make_room(layer, coming)
            arrived = self._bring_part(layer, coming)
            if arrived is not None:
                yield self._ready(layer, (arrived,))[1]
                self._used(layer, (), (arrived,))
        if coming.asked and self._beside is not None:
            yield self._beside.made(coming.asked)
            self._release_asked(layer, coming)
        self.settle()

    def groups(self, layer: int, routing: Routing) -> Iterator[Group]:
        """As many together as there are slots for: those that were here, those that come from DRAM, and those from the SSD: each further
        group takes the host as long to launch as the first. What the CPU computes comes with the last.

        Where all have slots, and readers copy what the SSD brings, they are one group before that has come: the host prepares their launch
        while the drive reads.
        """
        here, coming = self._begin(layer, routing, at_once=len(self._copies.slots))
        came: list[int] = []
        slots: Sequence[int] = ()
        if not coming.near and len(coming.carried) == len(coming.far):
            came = [*coming.started, *coming.far]
            coming.unread = bool(coming.far) and self._carried.awaited_unread and not self._cache.is_last(layer)
            if coming.far and self._looks_ahead and not coming.unread:
                self._decide(layer, coming, routing)
            slots, arrived = self._slots.placed(layer, (*here, *came))
            come = partial(self._come, layer, coming, slots, len(here))
            yield self._group(arrived, coming.asked, come) if coming.asked else Group(arrived, 0, tuple, come)
            assert coming.come or not coming.far, "whoever computes with a group has it come"
            self._behind = partial(self._end, layer, coming, routing, here, came, slots)
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
            if not more:
                break
            self._copies.left(slots)
            self._let_go(layer, here, came)
            here = came = []
        self._behind = partial(self._end, layer, coming, routing, here, came, slots)

    def _group(self, arrived: Sequence[Arrived], asked: Sequence[Asked], come: Callable[[], object] = tuple) -> Group:
        beside = self._beside
        return Group(arrived, len(asked), partial(beside.made, asked) if beside is not None and asked else tuple, come)

    def _come(self, layer: int, coming: Misses, slots: Sequence[int], here: int) -> None:
        """All of a visit's experts, which have ``slots``, the first of them ``here``: kernels issued from now on find them. What the SSD
        brings they wait for themselves, or the host sleeps for it by one call: what came is booked by :meth:`catch_up`."""
        clock, coming.come = self._clock, True
        if coming.far:
            clock.idle()
            if coming.unread and self._carried.awaits():
                clock.resume(self._device.compute_event())
                return
            if self._ahead.meanwhile is None:
                begun_s = time.perf_counter()
                over = self._carried.come(coming.carried)
                if over is not None:
                    coming.waited_s = time.perf_counter() - begun_s
                    clock.resume(over)
                    return
        late = self._copies.arrivals(slots, here)
        if coming.far:
            self._all_came(layer, coming)
            late = [*late, *self._copies.arrivals(slots, 0)]
        clock.resume(self._slots.await_all(late, clock.idle))

    def _all_came(self, layer: int, coming: Misses, awaited: bool = False) -> list[int]:
        """Wait for all that readers bring of the SSD, and have to copy. ``awaited``: kernels wait for it."""
        came, carried = [*coming.far], coming.carried
        self._dram.all_parts(layer, came, self._ahead.meanwhile, coming.waited_s)
        coming.far.clear()
        self._carried.all_came(layer, carried if len(carried) == len(came) else {expert: carried[expert] for expert in came}, awaited)
        return came

    def _end(self, layer: int, coming: Misses, routing: Routing, here: Sequence[int], came: Sequence[int], slots: Sequence[int]) -> None:
        """What a visit leaves to :meth:`catch_up`: its last experts were ``here``, or ``came``, and had ``slots``."""
        self._copies.left(slots)
        if not coming.decided:
            self._decide(layer, coming, routing)
        if coming.far:
            self._copies.await_all(slots)
            self._all_came(layer, coming, awaited=True)
        self._let_go(layer, here, came)
        self._release_asked(layer, coming)
        self._copies.points.fill()
        if self._copies.unbooked >= MOST_UNBOOKED or self._cache.is_last(layer):
            self._copies.settle()

    def _brought(self, layer: int, coming: Misses, others: bool) -> list[int]:
        """Wait for the SSD: for all that it still has to bring, where each has its slots; else for one, unless ``others`` are to be
        computed with and will leave some."""
        came: list[int] = []
        self._make_room(layer, coming)
        if not coming.near and coming.far.keys() <= coming.carried.keys():
            self._clock.pause()
            return self._all_came(layer, coming)
        placeless = [expert for expert in coming.far if self._cache.slot(layer, expert) is None]
        together = not coming.near and len(placeless) <= self._cache.free and self._dram.all_asked
        if together:
            for expert in placeless:
                self._slots.take(layer, expert)
        while coming.far and (together or not (others or came)):
            arrived = self._bring_part(layer, coming)
            came += [] if arrived is None else [arrived]
        return came

    def _begin(self, layer: int, routing: Routing, at_once: int) -> tuple[Sequence[int], Misses]:
        """Queue what is missing. Returns what is here, first what needs no more copies, and what is not. The router's choice was read back:
        whatever was computed with slots is over."""
        self.catch_up()
        self._copies.computed()
        seen = self._cache.find(layer, routing.experts)
        for slot in seen.dropped:
            self._cache.give_back(slot)
        partly = self._ahead.finish(layer, seen.hits)
        placed = self._cache.has_room(seen.misses)
        carrying = self._carrying if placed else None
        near, far = self._dram.visit(layer, routing, seen.misses, carrying)
        carried = self._carried.begun() if far else {}
        uncarried = len(carried) < len(far)
        if uncarried:
            self._dram.begun()
        asked = () if self._beside is None or not near else self._begin_beside(self._beside, layer, routing, near)
        if asked:
            elsewhere = {one.expert for one in asked}
            self._dram.set_aside(elsewhere)
            near = [e for e in near if e not in elsewhere]
        coming = Misses(deque(near), dict.fromkeys(far), deque(), at_once, carried, asked)
        if near:
            self._start(layer, coming)
        if uncarried and placed:
            for expert in [e for e in far if e not in carried]:
                self._slots.take(layer, expert)
        self.stats.visited(routing.prompt, len(seen.hits), len(seen.misses))
        return ([*(e for e in seen.hits if e not in partly), *partly] if partly else seen.hits), coming

    def _start(self, layer: int, coming: Misses) -> None:
        """Queue the copies of what lies in DRAM, as far as there are slots."""
        near = coming.near
        while near and (most := min(self._cache.free, coming.at_once)):
            if len(near) <= most:
                taken = [*near]
                near.clear()
            else:
                taken = [near.popleft() for _ in range(most)]
            self._slots.bring(layer, taken)
            coming.started.extend(taken)

    def _begin_beside(self, beside: BesideCard, layer: int, routing: Routing, near: Sequence[int]) -> Sequence[Asked]:
        """The CPU's share of the missed experts that lie in DRAM, which it begins before the first copy is queued."""
        places = dict(zip(near, self._dram.places(layer, near), strict=True))
        asked = beside.begin(layer, routing, places, self._copies.queued_bytes())
        for one in asked if not self._dram.still else ():
            self._dram.read_until([places[one.expert][0]], one.wait)
        return asked

    def _put_arrived_first(self, layer: int, coming: Misses) -> None:
        """Experts that the SSD has brought go before those that lay in DRAM: it reads on into the slots that they leave. Readers carry none
        of them on: they do where all that is missed has slots, and then nothing in DRAM waits for one."""
        came = self._dram.all_there(layer, coming.far, self._cache.free)
        for expert in came:
            del coming.far[expert]
        coming.near.extendleft(reversed(came))

    def _there(self, layer: int, experts: Collection[int], fit: Fit) -> int:
        """How many of ``experts``, from the first, which may be on its way, are there and fit: the card waits for none beside the first."""
        asked = [*experts]
        slots = self._cache.slots(layer, asked[: fit(asked)])
        return 1 + sum(1 for _ in takewhile(self._copies.is_there, slots[1:]))

    def _await(self, layer: int, expert: int) -> None:
        """Return when ``expert`` has arrived. Else the host would queue all of DRAM's copies at once, and what is read meanwhile would be
        copied behind them."""
        (slot,) = self._cache.slots(layer, (expert,))
        arrival = self._copies.arriving(slot)
        if arrival is not None:
            self._clock.pause()
            self._device.host_waits(arrival)

    def _make_room(self, layer: int, coming: Misses) -> None:
        """Let the CPU's experts go where something read finds no slot of DRAM: those that came before it may be there to stay in theirs."""
        if coming.asked and not self._dram.all_asked:
            self._release_asked(layer, coming)

    def _release_asked(self, layer: int, coming: Misses) -> None:
        """Once: a slot that is given again is not written before the CPU has read it."""
        if not coming.released:
            coming.released = True
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
            self._ahead.look(layer, routing.experts)

    def _bring_part(self, layer: int, coming: Misses) -> int | None:
        """Wait for parts of an expert from the SSD, for which there is a slot, and queue their copies. The expert, if that was the last."""
        self._clock.pause()
        wanted = coming.far if self._cache.free else [e for e in coming.far if self._cache.slot(layer, e) is not None]
        expert, numbers, over = self._dram.next_parts(layer, wanted, self._ahead.meanwhile)
        carried = coming.carried.get(expert)
        if carried is None:
            segments = [segment for number in numbers for segment in self._carried.segments_of((layer, expert), number)]
            slot = self._cache.slot(layer, expert)
            if slot is None:
                slot = self._slots.take(layer, expert)
            self._slots.copy((layer, expert), slot, self._dram.place(layer, expert)[0], Pieces.of(segments))
        elif over:
            self._carried.all_came(layer, {expert: carried})
        if not over:
            return None
        del coming.far[expert]
        return expert

    def _ready(self, layer: int, here: Sequence[int], came: Sequence[int] = ()) -> tuple[Sequence[int], Sequence[Arrived]]:
        """Slots of experts that were ``here`` and that ``came`` just now, and they, for kernels issued from now on: these wait until all
        have arrived."""
        slots, arrived = self._slots.placed(layer, (*here, *came))
        self._clock.resume(self._slots.arrive(slots, len(here), self._clock.pause))
        return slots, arrived

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

    def fetch_ahead(self) -> None:
        """See :class:`penstock.runtime.experts.tiers.copies_ahead.CopiesAhead`; called wherever the host passes by."""
        self._ahead.go_on()
