"""The VRAM ring: slots that streamed units pass through, filled by a copier that runs ahead of compute on events alone."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from planner.errors import UserError
from planner.placement import Unit
from runtime.device import CopyDevice, Event
from runtime.ledger import Ledger


class UnitSource(Protocol):
    """Where the ring's bytes come from: the DRAM tier."""

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]: ...

    def release(self, unit: Unit) -> None: ...


@dataclass(frozen=True)
class Segment:
    """One contiguous piece of a unit: ``nbytes`` from ``src`` in its DRAM layout to ``dst`` in its VRAM layout."""

    src: int
    dst: int
    nbytes: int


@dataclass
class _Slot:
    buffer: torch.Tensor
    left: Event | None = None
    """When the slot's last unit was used; None while that unit is still to be used."""
    free: bool = True


@dataclass
class RingStats:
    """``waits`` count the units that compute had to wait for on the host because their copy was not yet queued."""

    bytes: int = 0
    units: int = 0
    waits: int = 0
    wait_s: float = 0.0
    slot_wait_s: float = 0.0
    issue_s: float = 0.0
    log: list[tuple[str, str]] = field(default_factory=list)


class VramRing:
    """Streams ``units`` pass after pass through slots of two classes, at most ``distance`` units ahead of compute.

    The consumer calls :meth:`enter` and :meth:`leave` in forward order from one thread. A copy into a slot waits, on the device, for the
    event recorded when the slot's previous unit was left; a unit is used only after the event recorded behind its copy.
    The host blocks only when the copier has not yet queued what compute wants, never on the device.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        segments: Mapping[Unit, Sequence[Segment]],
        slots: Mapping[str, Sequence[torch.Tensor]],
        source: UnitSource,
        device: CopyDevice,
        distance: int,
        chunk_bytes: int,
        in_flight: int,
        ledger: Ledger,
        wrap: bool = True,
    ):
        self.stats = RingStats()
        self._units = tuple(units)
        self._segments = segments
        self._slots = {name: [_Slot(b) for b in buffers] for name, buffers in slots.items()}
        self._source = source
        self._device = device
        self._distance = distance
        self._chunk = chunk_bytes
        self._permits = threading.Semaphore(in_flight)
        self._ledger = ledger
        self._wrap = wrap
        self._cond = threading.Condition()
        self._arrived: dict[int, tuple[_Slot, int, Event]] = {}
        self._entered = 0
        self._passes = 0
        self._current: _Slot | None = None
        self._error: BaseException | None = None
        self._stop = False
        self._retiring: queue.SimpleQueue[tuple[Event, Event, Unit | None, int] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
            for name, work in (("penstock-copier", self._copy_all), ("penstock-retirer", self._retire_all))
        ]

    @property
    def largest_slot(self) -> torch.Tensor:
        """The buffer of one of the largest slots."""
        return max((slot.buffer for slots in self._slots.values() for slot in slots), key=torch.Tensor.numel)

    def start(self) -> None:
        """Begin copying the first units; with no units there is nothing to do."""
        for thread in self._threads if self._units else ():
            thread.start()

    def begin_pass(self) -> None:
        """Compute is about to visit the first unit again; without wrap-around, copying starts only now."""
        with self._cond:
            self._passes += 1
            self._cond.notify_all()

    def enter(self, unit: Unit) -> tuple[int, torch.Tensor]:
        """(slot index within its class, buffer) of ``unit``; kernels issued from now on see its bytes."""
        with self._cond:
            number = self._entered
            if self._units[number % len(self._units)] != unit:
                raise RuntimeError(f"unit {unit} entered out of order; expected {self._units[number % len(self._units)]}")
            if number not in self._arrived:
                begun = time.perf_counter()
                while number not in self._arrived:
                    self._raise_if_broken()
                    self._cond.wait(1.0)
                self.stats.waits += 1
                self.stats.wait_s += time.perf_counter() - begun
            slot, index, event = self._arrived.pop(number)
            self._entered += 1
            self._current = slot
            self._cond.notify_all()
        self._device.compute_waits(event)
        return index, slot.buffer

    def leave(self, unit: Unit, event: Event) -> None:
        """``event`` lies behind every kernel that reads ``unit``."""
        with self._cond:
            slot = self._current
            assert slot is not None, unit
            slot.left, slot.free = event, True
            self._cond.notify_all()

    def close(self) -> None:
        """Stop both threads; queued copies finish first."""
        with self._cond:
            self._stop = True
            self._cond.notify_all()
        self._retiring.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=30)

    def _numbers(self) -> Iterator[tuple[int, Unit]]:
        number = 0
        while True:
            yield number, self._units[number % len(self._units)]
            number += 1

    def _copy_all(self) -> None:
        turns = dict.fromkeys(self._slots, 0)
        for number, unit in self._numbers():
            with self._cond:
                self._cond.wait_for(lambda number=number: self._stop or self._may_fetch(number))
            if self._stop:
                return
            name = unit.ring_class
            index = turns[name] % len(self._slots[name])
            turns[name] += 1
            _, source = self._source.acquire(unit)
            slot = self._slots[name][index]
            with self._cond:
                begun = time.perf_counter()
                self._cond.wait_for(lambda slot=slot: self._stop or slot.free)
                self.stats.slot_wait_s += time.perf_counter() - begun
                if self._stop:
                    return
                left, slot.free = slot.left, False
            begun = time.perf_counter()
            event = self._copy(unit, slot, source, left)
            self.stats.issue_s += time.perf_counter() - begun
            with self._cond:
                self._arrived[number] = (slot, index, event)
                self._cond.notify_all()

    def _may_fetch(self, number: int) -> bool:
        if self._error is not None:
            raise self._error
        if not self._wrap and number // len(self._units) >= self._passes:
            return False
        return number < self._entered + self._distance

    def _copy(self, unit: Unit, slot: _Slot, source: torch.Tensor, left: Event | None) -> Event:
        if left is not None:
            self._device.copy_waits(left)
        pieces = list(_pieces(self._segments[unit], self._chunk))
        event = None
        for k, piece in enumerate(pieces):
            while not self._permits.acquire(timeout=0.5):
                self._raise_if_broken()
            start = self._device.copy_event()
            self._device.copy(slot.buffer[piece.dst : piece.dst + piece.nbytes], source[piece.src : piece.src + piece.nbytes])
            event = self._device.copy_event()
            self._retiring.put((start, event, unit if k == len(pieces) - 1 else None, piece.nbytes))
        assert event is not None
        self.stats.units += 1
        return event

    def _retire_all(self) -> None:
        while (item := self._retiring.get()) is not None:
            start, end, unit, nbytes = item
            self._device.host_waits(end)
            self._permits.release()
            self._ledger.add("h2d", str(unit or ""), self._device.time_of(start), self._device.time_of(end), nbytes)
            self.stats.bytes += nbytes
            if unit is not None:
                self._source.release(unit)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._cond:
                self._error = self._error or error
                self._cond.notify_all()

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stop:
            raise UserError("the weight stream was stopped")


def _pieces(segments: Sequence[Segment], chunk: int) -> Iterator[Segment]:
    for segment in segments:
        for start in range(0, segment.nbytes, chunk):
            yield Segment(segment.src + start, segment.dst + start, min(chunk, segment.nbytes - start))
