"""The VRAM tier of experts: slots on the card, copies that bring experts to them, and a throttled thread that fetches some ahead."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from planner.expert_cache import ExpertCache, Routing
from planner.interrupt import uninterrupted
from planner.placement import Unit
from planner.trace import EXPERTS
from runtime.booking import Booking, Queued
from runtime.device import CopyDevice, Event
from runtime.ledger import Ledger
from runtime.model import parameters
from runtime.moe.dram import DramExperts, Key
from runtime.moe.forward import Arrived
from runtime.moe.host import ComputeClock
from runtime.moe.stats import TierStats
from runtime.pieces import Segment, cut, within
from runtime.vram import DeviceLayout


@dataclass(eq=False)
class _Coming:
    """An expert that is fetched ahead from a slot in DRAM: what of it is still to be queued."""

    key: Key
    slot: int
    dram_slot: int
    source: torch.Tensor
    chunks: deque[Segment]


class CardExperts:
    """Experts in VRAM ``slots`` under ``cache``, brought from ``dram``.

    A visit computes with what is here at once. What is in DRAM is copied next, what is on the SSD as its parts arrive in DRAM; the host
    waits for parts of the SSD alone. Copies have the stream of ``device`` to themselves, where a demanded expert waits for no more than
    the ``in_flight`` chunks that :meth:`start`'s thread keeps queued of those fetched ahead.
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
        prefetch: int,
    ):
        self.stats = TierStats()
        self.bytes = 0
        self._layouts, self._slots, self._cache, self._dram = layouts, slots, cache, dram
        self._device, self._clock = device, clock
        self._chunk_bytes, self._in_flight, self._prefetch = chunk_bytes, in_flight, prefetch
        self._booking = Booking(device, ledger, EXPERTS)
        self._cond = threading.Condition()
        self._queued: deque[Queued] = deque()
        self._arrived: dict[int, Event] = {}
        self._left: dict[int, Event] = {}
        self._coming: dict[Key, _Coming] = {}
        self._ahead: set[Key] = set()
        self._wanted: deque[Key] = deque()
        self._views: dict[tuple[Key, int], Mapping[str, torch.Tensor]] = {}
        self._error: BaseException | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._drive, name="penstock-experts", daemon=True)

    def settle(self) -> None:
        """Book all copies that are over; never blocks."""
        with self._cond:
            while self._queued and self._device.done(self._queued[0].end):
                self._booking.book(self._queued.popleft())

    def keep_first(self) -> dict[Key, torch.Tensor]:
        """The slots that layers keep, given to their first experts: whoever calls this fills them before :meth:`start`."""
        places = {}
        for layer, expert in self._layouts:
            slot = self._cache.keep(layer, expert)
            if slot is not None:
                places[layer, expert] = self._slots[slot]
        return places

    def start(self) -> None:
        """Fill from DRAM the slots that layers keep and that nobody filled, and begin to fetch ahead where a visit says so."""
        filled = self._device.copy_event()
        for layer, expert in self._layouts:
            slot = self._cache.slot(layer, expert)
            if slot is not None:
                self._arrived[slot] = filled
            elif self._dram.here(layer, expert):
                slot = self._cache.keep(layer, expert)
                if slot is not None:
                    self._copy_all(layer, expert, slot)
        with uninterrupted():
            self._thread.start()

    def route(self, index: torch.Tensor) -> torch.Tensor:
        return index

    def visit(self, layer: int, routing: Routing) -> Iterator[Arrived]:
        self.settle()
        with self._cond:
            if self._error is not None:
                raise self._error
            self._wanted.clear()
            with self.stats.deciding():
                seen = self._cache.visit(layer, routing, routing.experts)
            self.stats.visited(routing.prompt, len(seen.hits), len(seen.misses))
            self.stats.ahead_used += len({(layer, e) for e in seen.hits} & self._ahead)
            self._ahead.clear()
            for slot in seen.dropped:
                self._cache.give_back(slot)
            begun, self._coming = self._coming, {}
            for coming in begun.values():
                if coming.key[0] == layer and coming.key[1] in seen.hits:
                    self._queue(coming, len(coming.chunks))
            misses = self._dram.visit(layer, routing, seen.misses)
        partly = [e for e in seen.hits if (layer, e) in begun]
        for expert in sorted(seen.hits, key=partly.__contains__):
            yield from self._use(layer, expert, late=expert in partly)
        yield from self._bring(layer, misses, len(routing.experts))

    def _bring(self, layer: int, misses: Sequence[int], touched: int) -> Iterator[Arrived]:
        """Each of ``misses``, those in DRAM first; once the last copy is queued, those of the coming layer may begin."""
        near = [e for e in misses if self._dram.here(layer, e)]
        far = dict.fromkeys(e for e in misses if e not in near)
        if not misses:
            self._look_ahead(layer, touched)
        for expert in near:
            self._copy_all(layer, expert, self._take(layer, expert))
            self._dram.release(layer, expert)
            if not far and expert == near[-1]:
                self._look_ahead(layer, touched)
            yield from self._use(layer, expert, late=True)
        parts = {expert: self._dram.parts(layer, expert) for expert in far}
        while far:
            expert, number, over = self._dram.next_part(layer, far)
            slot = self._cache.slot(layer, expert)
            if slot is None:
                slot = self._take(layer, expert)
            dram_slot, source = self._dram.place(layer, expert)
            with self._cond, self._device.copying():
                for extent in parts[expert][number]:
                    self._issue((layer, expert), slot, source, within(self._layouts[layer, expert].segments, extent.dest, extent.nbytes))
                self._dram.read_until(dram_slot, partial(self._device.host_waits, self._arrived[slot]))
            if over:
                del far[expert]
                self._dram.release(layer, expert)
                if not far:
                    self._look_ahead(layer, touched)
                yield from self._use(layer, expert, late=True)

    def _use(self, layer: int, expert: int, late: bool) -> Iterator[Arrived]:
        key, slot = (layer, expert), self._cache.slot(layer, expert)
        arrival = self._arrived[slot]
        if late:
            self._clock.pause()
        self._device.compute_waits(arrival)
        if late:
            self._clock.resume(arrival)
        views = self._views.get((key, slot))
        if views is None:
            views = self._views[key, slot] = parameters(self._layouts[key].tensors, self._slots[slot])
        yield expert, views
        with self._cond:
            self._left[slot] = self._device.compute_event()
            let_go = self._cache.settle(layer, expert)
            if let_go is not None:
                self._cache.give_back(let_go)
                self._cond.notify_all()

    def _take(self, layer: int, expert: int) -> int:
        with self._cond:
            slot = self._cache.take(layer, expert)
            if slot is None:
                raise RuntimeError(f"no slot for expert {layer}.{expert}")
            return slot

    def _copy_all(self, layer: int, expert: int, slot: int) -> None:
        dram_slot, source = self._dram.place(layer, expert)
        with self._cond, self._device.copying():
            self._issue((layer, expert), slot, source, self._layouts[layer, expert].segments)
            self._dram.read_until(dram_slot, partial(self._device.host_waits, self._arrived[slot]))

    def _issue(self, key: Key, slot: int, source: torch.Tensor, segments: Iterable[Segment]) -> None:
        """Queue copies of ``segments`` behind whatever reads ``slot``; the slot has arrived at the last one's end."""
        left = self._left.pop(slot, None)
        if left is not None:
            self._device.copy_waits(left)
        issued_s, nbytes = time.perf_counter(), 0
        for s in segments:
            self._device.copy(self._slots[slot][s.dst : s.dst + s.nbytes], source[s.src : s.src + s.nbytes])
            nbytes += s.nbytes
        self._arrived[slot] = self._device.copy_event()
        self.bytes += nbytes
        self._queued.append(Queued(issued_s, self._arrived[slot], Unit("expert", *key), nbytes, last=False, cleared=None))

    def _look_ahead(self, layer: int, touched: int) -> None:
        with self._cond:
            with self.stats.deciding():
                after, wanted = self._cache.coming(layer, touched, self._prefetch)
            self._wanted.extend((after, expert) for expert in wanted)
            self._cond.notify_all()

    def _drive(self) -> None:
        """Queue chunk after chunk of what is wanted ahead, ``in_flight`` at most."""
        under_way: deque[Event] = deque()
        try:
            while True:
                with self._cond:
                    self._cond.wait_for(lambda: self._stop or self._next_ahead() is not None)
                    if self._stop:
                        return
                    coming = self._next_ahead()
                    self._queue(coming, 1)
                    under_way.append(self._arrived[coming.slot])
                    if not coming.chunks:
                        del self._coming[coming.key]
                while len(under_way) >= self._in_flight:
                    self._device.host_waits(under_way.popleft())
        except BaseException as error:  # raised in the thread that computes
            with self._cond:
                self._error = error

    def _next_ahead(self) -> _Coming | None:
        """What is being fetched ahead, or else the next that can be: it lies in DRAM, and a demand would still find a slot."""
        for coming in self._coming.values():
            return coming
        while self._wanted and self._cache.free > 1:
            key = self._wanted.popleft()
            if self._dram.here(*key):
                self.stats.ahead += 1
                self._ahead.add(key)
                dram_slot, source = self._dram.place(*key)
                chunks = deque(cut(self._layouts[key].segments, self._chunk_bytes))
                self._coming[key] = _Coming(key, self._cache.take(*key), dram_slot, source, chunks)
                return self._coming[key]
        return None

    def _queue(self, coming: _Coming, most: int) -> None:
        chunks = [coming.chunks.popleft() for _ in range(most)]
        if chunks:
            with self._device.copying():
                self._issue(coming.key, coming.slot, coming.source, chunks)
            self._dram.read_until(coming.dram_slot, partial(self._device.host_waits, self._arrived[coming.slot]))

    def close(self) -> None:
        """End the thread that fetches ahead; what is queued finishes."""
        with self._cond:
            self._stop = True
            self._cond.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=30)
