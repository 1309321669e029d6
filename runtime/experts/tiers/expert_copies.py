"""Copies of experts into slots of VRAM, each behind whatever used its slot before."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from penstock.planner.common.timeline.spans import EXPERTS
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.experts.tiers.points_ahead import PointsAhead
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.moving.booking import Booking, Queued
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.reading.native.native_carrier import NativeCarrier
from penstock.runtime.reading.native.native_order import Order

MOST_UNBOOKED = 256
"""Copies after which a visit books those that are over."""


class Pieces(NamedTuple):
    """``segments`` of an expert, as a carrier takes them, too, and their bytes."""

    segments: Sequence[Segment]
    words: array[int]
    at: int
    """Where the words lie."""
    number: int
    """Of segments."""
    nbytes: int

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> Pieces:
        words = NativeCarrier.words(segments)
        return cls(segments, words, words.buffer_info()[0], len(segments), sum([s.nbytes for s in segments]))


class _Together(NamedTuple):
    """Experts behind one event."""

    layer: int
    experts: Sequence[int]

    def __str__(self) -> str:
        return " ".join(str(Unit("expert", self.layer, expert)) for expert in self.experts)


_Unbooked = tuple[float, Event, int, Sequence[int], int]
"""When copies were queued, the event behind them, the layer and its experts, and how many bytes."""


def _first(row: tuple[int, int, Event, int]) -> int:
    return row[0]


class ExpertCopies:
    """The copy stream of ``device`` and the events at both ends of each of ``slots``. One caller at a time. A ``carrier`` queues copies
    there by one call, which is short beside a call for each."""

    def __init__(
        self, slots: Sequence[torch.Tensor], device: CopyDevice, ledger: Ledger, dram: tuple[int, int],
        buffer: Callable[[int], torch.Tensor], carrier: NativeCarrier | None = None,
    ):  # fmt: skip
        """``dram``: where its first slot lies, and bytes from each to the next. To ask a tensor for that takes longer than to queue it.
        ``buffer``: the bytes of each slot there."""
        self.slots, self._dram, self._buffer = slots, dram, buffer
        self.begins = [slot.data_ptr() for slot in slots]
        """Where they lie."""
        self._carrier = carrier
        self._whole: set[int] = set()
        """Slots of DRAM that :meth:`reaches`."""
        self.device = device
        self.points = PointsAhead(device)
        self._booking = Booking(device, ledger, EXPERTS)
        self._queued: deque[_Unbooked] = deque()
        self.copied_s = 0.0
        """When the caller's latest copies had been queued, by the host's clock."""
        self._arrived: dict[int, Event] = {}
        self.used: set[int] = set()
        """Slots that kernels read which may not be over."""
        self._awaited: list[Event] = []
        """Copies for which kernels wait that may not be over."""

    def copy(self, layer: int, experts: Sequence[int], slots: Sequence[int], dram_slots: Sequence[int], pieces: Sequence[Pieces]) -> Event:
        """Queue the copies of ``pieces`` of ``experts``, each into one of ``slots`` from one of ``dram_slots``. They wait for kernels that
        read their slots. Returns the event behind the last of them, which they share: to record and to book one takes the host as long as
        a copy. Not a tuple an expert: a visit would make them and take them apart."""
        issued_s, nbytes = time.perf_counter(), 0
        moves: list[int] = []
        begin, step = self._dram
        if self.used:
            self.make_way(slots)
        for slot, dram_slot, (segments, _, at, number, bytes_here) in zip(slots, dram_slots, pieces, strict=True):
            if dram_slot in self._whole or self.reaches(dram_slot):
                moves += (at, number, self.begins[slot], begin + dram_slot * step)
            else:
                self.device.copy_parts(self.slots[slot], self._buffer(dram_slot), segments)
            nbytes += bytes_here
        if moves and self._carrier is not None:
            (over,), (handle,) = self.points.take(1)
            self._carrier.copy(array("q", moves), handle)
        else:
            over = self.device.copy_event()
        self._arrived |= dict.fromkeys(slots, over)
        self.copied_s = time.perf_counter()
        self._queued.append((issued_s, over, layer, experts, nbytes))
        return over

    def reaches(self, dram_slot: int) -> bool:
        """Whether the carrier may copy what lies in ``dram_slot``: there is one, and the driver takes it as one piece. That stays so:
        whoever has a card has all of the arena page-locked."""
        if dram_slot in self._whole:
            return True
        begin, step = self._dram
        if self._carrier is None or not self.device.in_one_piece(begin + dram_slot * step, step):
            return False
        self._whole.add(dram_slot)
        return True

    def make_way(self, slots: Sequence[int]) -> None:
        """Whatever is copied into ``slots`` from now on waits for kernels that read them, if any do: then for all that were issued."""
        if not self.used.isdisjoint(slots):
            self.device.copy_waits(self.device.compute_event())
            self.used.clear()

    def carried(self, slots: Sequence[int], over: Event, begun_s: float) -> None:
        """The threads that read experts have queued their copies into ``slots``, all before ``over``, the last of them from ``begun_s`` of
        the host's clock on. Kernels that are issued next wait for them; where the caller's own copies were queued before that one, they
        wait for it alone, since the driver takes the host 20 us a wait on some hosts."""
        if self.copied_s < begun_s:
            self._awaited += self._arrived.values()
            slots = (*self._arrived, *slots)
        self._arrived |= dict.fromkeys(slots, over)

    def book(self, layer: int, expert: int, order: Order[Any], events: Sequence[Event]) -> None:
        """The copies of ``order``, an expert that kernels wait for, are to be booked when they are over."""
        for _, begun_ns, over, nbytes in sorted(zip(order.numbers, order.begun_ns, events, order.nbytes, strict=True), key=_first):
            self._queued.append((begun_ns * 1e-9, over, layer, (expert,), nbytes))
        self._awaited += events

    def lies_in(self, slots: Iterable[int]) -> None:
        """They were filled by somebody else."""
        self._arrived |= dict.fromkeys(slots, self.device.copy_event())

    def arrivals(self, slots: Sequence[int], here: int) -> Sequence[Event]:
        """Behind the last copies into ``slots``, for what computes with them next; nothing of those that have been waited for before, or,
        of the first ``here`` slots, that are over."""
        arrived = self._arrived
        found: list[Event] = []
        for at, slot in enumerate(slots) if arrived else ():
            over = arrived.pop(slot, None)
            if over is None or over in found:
                continue
            self._awaited.append(over)
            if at >= here or not self.device.done(over):
                found.append(over)
        return found

    def await_all(self, slots: Sequence[int]) -> None:
        """Kernels that were issued wait for all copies into ``slots``, as somebody has seen to."""
        arrived = self._arrived
        if arrived:
            self._awaited += [arrived.pop(slot) for slot in slots if slot in arrived]

    def arriving(self, slot: int) -> Event | None:
        """Behind the last copy into ``slot``; None where it has been waited for before."""
        return self._arrived.get(slot)

    def is_there(self, slot: int) -> bool:
        """Whether the last copy into ``slot`` is over, as far as the driver says now."""
        over = self._arrived.get(slot)
        return over is None or self.device.done(over)

    def left(self, slots: Iterable[int]) -> None:
        """What computes with ``slots`` is queued."""
        self.used.update(slots)

    def computed(self) -> None:
        """All kernels that were issued are over, and so are the copies that they waited for. The driver would take longer to say so: it is
        asked of each copy before its slot in DRAM is written, its time is booked, or the CPU is asked to help."""
        self.used.clear()
        if self._awaited:
            self.device.note_done(self._awaited)
            self._awaited.clear()

    def queued_bytes(self) -> int:
        """What was queued last and is not over; never blocks. The driver is asked about these alone: copies wait here to be booked long
        after they are over."""
        nbytes = 0
        for _, over, _, _, queued in reversed(self._queued):
            if self.device.done(over):
                break
            nbytes += queued
        return nbytes

    def settle(self) -> None:
        """Book all copies that are over; never blocks. To book many at once takes the host a fraction of what it takes to book each with
        cold caches: from :data:`MOST_UNBOOKED` on it is time."""
        while self._queued and self.device.done(self._queued[0][1]):
            issued_s, over, layer, experts, nbytes = self._queued.popleft()
            self._booking.book(Queued(issued_s, over, _Together(layer, experts), nbytes, last=False, cleared=None))

    @property
    def unbooked(self) -> int:
        """Copies to be booked."""
        return len(self._queued)
