"""The VRAM ring: slots that streamed units pass through, filled by a copier that runs ahead of compute on events alone."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol, cast

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import uninterrupted
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.policy.turns import Turns
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.memory.pieces import Parts, Segment
from penstock.runtime.moving.booking import Booking, Cleared, Queued
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.moving.waiter import Waiter

Ready = Callable[[], bool]


class UnitSource(Protocol):
    """Where the ring's bytes come from: the DRAM tier."""

    def arrived(self, unit: Unit) -> bool:
        """Whether :meth:`acquire` would not wait."""

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        """A name of the memory, the same one whenever ``unit`` lies there, and the memory itself."""

    def release(self, unit: Unit) -> None:
        """What was acquired was copied."""


@dataclass
class _Slot:
    buffer: torch.Tensor
    left: Event | None = None
    """Behind the kernels that read the slot's last unit."""


class _Fetched(NamedTuple):
    """A unit in DRAM, and the host times at which the window reached it and DRAM held it."""

    slot: int
    source: torch.Tensor
    window_s: float
    dram_s: float


@dataclass
class RingStats:
    """``waits``: units whose copy was not yet queued when compute needed them, so that the host waited. ``slot_waits``: copies that waited
    for a slot. ``out_of_turn``: units copied before an earlier one. ``issue_s``: processor time."""

    bytes: int = 0
    units: int = 0
    out_of_turn: int = 0
    waits: int = 0
    wait_s: float = 0.0
    slot_waits: int = 0
    slot_wait_s: float = 0.0
    issue_s: float = 0.0
    log: list[tuple[str, str]] = field(default_factory=list)

    def __add__(self, other: RingStats) -> RingStats:
        return RingStats(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


class VramRing:
    """Streams ``units`` pass after pass through slots of several classes, at most ``distance`` units ahead of compute. ``balance``,
    ``keep`` and ``late`` are those of :class:`Turns`. ``pieces`` gives the copies that bring a unit, at least one, when its turn has come.

    The consumer calls :meth:`enter` and :meth:`leave` in forward order from one thread. Two waits happen on the device alone: a copy waits
    for the event recorded when the slot's previous unit was left, and compute waits for the event recorded behind the copy. The host blocks
    only if the copier has not yet queued what compute needs.

    :class:`Turns` decides. :meth:`copying` and :meth:`retiring` act: each is a generator that yields what it waits for. A thread of its own
    drives it, or a test does, in any order.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        pieces: Callable[[Unit], Sequence[Segment]],
        slots: Mapping[str, Sequence[torch.Tensor]],
        source: UnitSource,
        device: CopyDevice,
        distance: int,
        in_flight: int,
        ledger: Ledger,
        wrap: bool = True,
        balance: int = 1,
        keep: int = 0,
        track: str = "h2d",
        late: Collection[int] = (),
    ):
        self.stats = RingStats()
        counts = {name: len(buffers) for name, buffers in slots.items()}
        self.turns = Turns([u.ring_class for u in units], counts, distance, wrap, balance, keep, late)
        self._units = tuple(units)
        self._pieces = pieces
        self._slots = {name: [_Slot(b) for b in buffers] for name, buffers in slots.items()}
        self._source = source
        self._device = device
        self._in_flight = in_flight
        self._booking = Booking(device, ledger, track)
        self._lock = threading.RLock()
        self._consumer, self._copier, self._retirer = Waiter(self._lock), Waiter(self._lock), Waiter(self._lock)
        self._into, self._from = Parts(), Parts()
        self._fetched: dict[int, _Fetched] = {}
        self._arrived: dict[int, Event] = {}
        self._queued: deque[Queued] = deque()
        self.entered_after: Event | None = None
        """What compute waits for before it uses the unit that was entered last."""
        self._error: BaseException | None = None
        self._stop = False
        self._paused = False
        self._copying_now = False
        self._copier_over = False
        self._threads = [
            threading.Thread(target=self._drive, args=(work, waiter), name=name, daemon=True)
            for name, work, waiter in (
                ("penstock-copier", self.copying(), self._copier),
                ("penstock-retirer", self.retiring(), self._retirer),
            )
        ]

    @property
    def slots(self) -> list[torch.Tensor]:
        """The buffers of all slots."""
        return [slot.buffer for slots in self._slots.values() for slot in slots]

    def start(self) -> None:
        """Begin copying the first units; with no units there is nothing to do."""
        with uninterrupted():
            for thread in self._threads if self._units else ():
                thread.start()

    def pause(self) -> None:
        """Between two passes: return when everything queued has been copied; nothing is copied until :meth:`adopt`."""
        with self._lock:
            self._paused = True
            self._copier.tell()
            self._consumer.wait(lambda: self._stop or not (self._copying_now or self._queued))
            if self._error is not None:
                raise self._error

    def ahead(self) -> list[tuple[Unit, torch.Tensor]]:
        """What was copied for the passes that come, with its slot."""
        return [(self._unit(number), self._slot(number).buffer) for number in sorted(self._arrived)]

    def adopt(self, buffers: Mapping[Unit, torch.Tensor], behind: Event, bring: Callable[[Unit, torch.Tensor], Event]) -> None:
        """After :meth:`pause`, go on. ``buffers`` says which units lie in which of the same slots once ``behind`` has happened. Those that
        the next pass begins with are not copied again, however many. What was :meth:`ahead` and is not there, or was ahead twice, ``bring``
        copies into a slot."""
        with self._lock:
            ahead, self._arrived = sorted(self._arrived), {}
            free = {slot.buffer.data_ptr(): slot.buffer for slots in self._slots.values() for slot in slots}
            found: dict[tuple[str, int], torch.Tensor] = {}

            def there(number: int) -> bool:
                buffer = buffers.get(self._unit(number))
                if buffer is None or free.pop(buffer.data_ptr(), None) is None:
                    return False
                found[self.turns.place(number)], self._arrived[number] = buffer, behind
                return True

            for number in ahead:
                there(number)
            for number in self.turns.find(there):
                if self._fetched.pop(number, None) is not None:
                    self._source.release(self._unit(number))
            for name, slots in self._slots.items():
                rest = iter([slot.buffer for slot in slots if slot.buffer.data_ptr() in free])
                self._slots[name] = [_Slot(found[name, k] if (name, k) in found else next(rest), behind) for k in range(len(slots))]
            for number in ahead:
                if number not in self._arrived:
                    self._arrived[number] = bring(self._unit(number), self._slot(number).buffer)
            self._into, self._booking = Parts(), self._booking.anew()
            self._paused = False
            self._copier.tell()

    def begin_pass(self) -> None:
        """Compute is about to visit the first unit again; without wrap-around, copying starts only now."""
        with self._lock:
            self.turns.begun += 1
            self._copier.tell()

    def enter(self, unit: Unit) -> tuple[int, torch.Tensor]:
        """(slot index within its class, buffer) of ``unit``; kernels issued from now on see its bytes."""
        with self._lock:
            number = self.turns.entered
            if self._unit(number) != unit:
                raise RuntimeError(f"unit {unit} entered out of order; expected {self._unit(number)}")
            self.turns.asked = number + 1
            if not self.turns.may_enter():
                begun = time.perf_counter()
                self._copier.tell()  # ``asked`` has moved: with distance 0 the copier waits for just that
                self._consumer.wait(lambda: self._stop or self.turns.may_enter())
                self._raise_if_broken()
                self.stats.waits += 1
                self.stats.wait_s += time.perf_counter() - begun
            copied = self._arrived.pop(number)
            self.turns.entered += 1
            self._copier.tell()
        self._device.compute_waits(copied)  # outside the lock: a call into the driver would hold up the copier
        self.entered_after = copied
        name, index = self.turns.place(number)
        return index, self._slots[name][index].buffer

    def leave(self, unit: Unit, event: Event) -> None:
        """``event`` lies behind every kernel that reads ``unit``."""
        with self._lock:
            if self.turns.left >= self.turns.entered:
                raise RuntimeError(f"unit {unit} left without being entered")
            name, index = self.turns.place(self.turns.left)
            self._slots[name][index].left = event
            self.turns.left += 1
            self._copier.tell()

    def close(self) -> None:
        """Stop both threads; queued copies finish first, so that their DRAM and their slots may be used for something else."""
        self._end()
        copier, retirer = self._threads
        _join(copier)  # first: the retirer gives back the DRAM of what the copier queued last
        with self._lock:
            self._copier_over = True
            self._retirer.tell()
        _join(retirer)

    def copying(self) -> Iterator[Ready]:
        """Fetch and copy unit after unit, at most ``in_flight`` copies queued; goes on when what it yielded is true, ends on stop."""
        turns = self.turns
        while True:
            begun, waiting = time.perf_counter(), bool(self._fetched)
            yield self._may_go_on
            if self._stop:
                return
            if waiting:
                self.stats.slot_wait_s += time.perf_counter() - begun
            number = turns.next_copy()
            if number is None and turns.is_copied(turns.fetched):
                self._pass_over(turns.fetched)
            elif number is None:
                self._fetch(turns.fetched)
                self.stats.slot_waits += turns.next_copy() is None
            else:
                yield from self._copying(number)

    def _may_go_on(self) -> bool:
        """Whether the copier, which is between two units, has something to do; under the lock."""
        may = not self._paused and (self.turns.next_copy() is not None or self._may_fetch())
        self._copying_now = may
        if self._paused:
            self._consumer.tell()
        return self._stop or may

    def _may_fetch(self) -> bool:
        return self.turns.may_fetch_now(lambda number: self._source.arrived(self._unit(number)))

    def _fetch(self, number: int) -> None:
        window_s = time.perf_counter()
        slot, source = self._source.acquire(self._unit(number))
        self._fetched[number] = _Fetched(slot, source, window_s, time.perf_counter())
        self.turns.fetched += 1

    def _pass_over(self, number: int) -> None:
        """It was found in its slot. DRAM is asked all the same, which counts visits."""
        unit = self._unit(number)
        self._source.acquire(unit)
        self._source.release(unit)
        self.turns.fetched += 1

    def _copying(self, number: int) -> Iterator[Ready]:
        unit, fetched = self._unit(number), self._fetched.pop(number)
        index, slot = self.turns.place(number)[1], self._slot(number)
        pieces, n = self._pieces(unit), number % len(self._units)
        for k, piece in enumerate(pieces):
            yield lambda: self._stop or len(self._queued) < self._in_flight
            if self._stop:
                return
            begun = time.thread_time()
            if k == 0 and slot.left is not None:  # the stream waits, not the host: copies are queued ahead of compute
                self._device.copy_waits(slot.left)
            last = k == len(pieces) - 1
            cleared = None if k else Cleared(fetched.window_s, fetched.dram_s, slot.left)
            dst = self._into.part((n, k, index), slot.buffer, piece.dst, piece.nbytes)
            src = self._from.part((n, k, fetched.slot), fetched.source, piece.src, piece.nbytes)
            copied = self._copy(dst, src, unit, last, cleared)
            self.stats.issue_s += time.thread_time() - begun
        with self._lock:
            self._arrived[number] = copied
            self.stats.out_of_turn += number != self.turns.first
            self.turns.copy(number)
            self.stats.units += 1
            self._consumer.tell()

    def retiring(self) -> Iterator[Ready]:
        """Wait for copy after copy, book it and give its DRAM back; ends once the copier has ended and nothing is queued."""
        while True:
            yield lambda: self._copier_over or bool(self._queued)
            if not self._queued:
                return
            copy = self._queued[0]
            self._device.host_waits(copy.end)  # the ring's one host wait, on a thread that nobody waits for, without the lock
            with self._lock:
                self._queued.popleft()
                self._copier.tell()
            self._booking.book(copy)
            self.stats.bytes += copy.nbytes
            if copy.last:
                self._source.release(cast(Unit, copy.unit))
            if self._paused:
                with self._lock:
                    self._consumer.tell()

    def _slot(self, number: int) -> _Slot:
        name, index = self.turns.place(number)
        return self._slots[name][index]

    def _unit(self, number: int) -> Unit:
        return self._units[number % len(self._units)]

    def _copy(self, dst: torch.Tensor, src: torch.Tensor, unit: Unit, last: bool, cleared: Cleared | None) -> Event:
        issued_s = time.perf_counter()
        self._device.copy(dst, src)
        end = self._device.copy_event()
        with self._lock:
            self._queued.append(Queued(issued_s, end, unit, dst.numel(), last, cleared))
            self._retirer.tell()
        return end

    def _drive(self, work: Iterator[Ready], waiter: Waiter) -> None:
        try:
            with self._device.copying():
                for ready in work:
                    with self._lock:
                        waiter.wait(ready)
        except BaseException as error:  # handed to compute, which waits for the units that will not come
            with self._lock:
                self._error = self._error or error
                self._end()

    def _end(self) -> None:
        with self._lock:
            self._stop = True
            for waiter in (self._consumer, self._copier, self._retirer):
                waiter.tell()

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if not self.turns.may_enter():
            raise UserError("the weight stream was stopped")


def _join(thread: threading.Thread) -> None:
    if thread.is_alive():
        thread.join(timeout=30)
