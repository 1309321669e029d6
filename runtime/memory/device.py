"""The compute device as the ring sees it: copies and events, never a host synchronize on the way."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Protocol

import torch

from penstock.runtime.memory.bare_copies import BareCopies, BareEvent, DriverCalls, wait_for_value, write_value
from penstock.runtime.memory.card_events import CardEvent, CardEvents, HostPoint
from penstock.runtime.memory.pieces import Segment

_MAPPED = 2  # cudaHostRegisterMapped: kernels may read it in place


class Event(Protocol):
    """A point in a stream of device work."""


class CopyLane(Protocol):
    """A copy stream of its own, between page-locked memory and the device in either direction."""

    def copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue (destination, source) copies of uint8; asynchronous, but for memory that is not page-locked."""

    def event(self) -> Event:
        """The point after everything queued so far."""

    def waits(self, event: Event) -> None:
        """Copies queued from now on begin after ``event``."""


class CopyDevice(Protocol):
    """One copy stream beside one compute stream, and further ones beside those."""

    def twin(self) -> CopyDevice:
        """The same card and host memory with a copy stream of its own."""

    def lane(self) -> CopyLane:
        """A further copy stream, of lower priority."""

    def launch(self, kernel: Callable[[], None]) -> None:
        """Issue what ``kernel`` launches, on the compute stream."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the device's own memory."""

    def copying(self) -> AbstractContextManager[object]:
        """Inside, the calling thread may :meth:`copy`."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a host-to-device copy on the copy stream."""

    def copy_parts(self, into: torch.Tensor, source: torch.Tensor, segments: Iterable[Segment]) -> None:
        """Queue host-to-device copies of ``segments`` of ``source`` to their places in ``into``, both uint8, on the copy stream. Needs no
        :meth:`copying`."""

    def driver_calls(self) -> DriverCalls | None:
        """By which copies are queued on the copy stream, and kernels wait for them, without Python; None where only Python can."""

    def in_one_piece(self, begin: int, nbytes: int) -> bool:
        """Whether they may copy as one what lies in ``nbytes`` of DRAM from address ``begin`` on."""

    def event_ahead(self) -> tuple[Event, int]:
        """A point in the copy stream that such a thread will record, and the driver's handle for it. Nothing is asked of it before."""

    def copy_event(self) -> Event:
        """The point in the copy stream after everything queued so far."""

    def compute_event(self) -> Event:
        """The point in the compute stream after everything issued so far."""

    def idle_point(self) -> Event:
        """The same where all of it is over, as far as the host knows: the driver is not asked."""

    def copy_waits(self, event: Event) -> None:
        """Copies queued from now on begin after ``event``."""

    def compute_waits(self, event: Event) -> None:
        """Kernels issued from now on begin after ``event``."""

    def compute_waits_for(self, flag: torch.Tensor, value: int) -> None:
        """Kernels issued from now on begin once the first number of page-locked ``flag`` (int32) is ``value`` or more."""

    def compute_writes(self, flag: torch.Tensor, value: int) -> None:
        """Behind the kernels issued so far the first number of page-locked ``flag`` (int32) becomes ``value``, which everybody sees by
        then."""

    def host_waits(self, event: Event) -> None:
        """Block the calling thread until ``event`` has happened."""

    def done(self, event: Event) -> bool:
        """Whether ``event`` has happened; never blocks."""

    def note_done(self, events: Iterable[Event]) -> None:
        """``events`` have happened, as whoever read back what was computed behind them knows: the driver need not be asked."""

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        """Page-locked ``host`` (uint8) as a tensor that kernels read over the link, without a copy."""

    def time_of(self, event: Event) -> float:
        """When an event that has happened did, in seconds of ``time.perf_counter``."""


class CudaDevice:
    """A CUDA card: the weights' copy stream has the higher priority, so copies never queue behind kernels."""

    def __init__(self, index: int = 0):
        self.device = torch.device("cuda", index)
        self.copies = torch.cuda.Stream(self.device, priority=-1)
        """Of the weights."""
        self._compute = torch.cuda.current_stream(self.device)
        self.events = CardEvents(BareEvent)
        self._base = self.events.record(self._compute)
        self._base.wait()
        self._base_s = time.perf_counter()
        self.borders: list[int] = []
        """Ascending addresses where page-locked memory begins and ends."""

    def lane(self) -> CudaLane:
        return CudaLane(self)

    def launch(self, kernel: Callable[[], None]) -> None:
        kernel()  # the compute stream is every thread's current one

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def lock(self, address: int, nbytes: int) -> str | None:
        """Page-lock host memory, readable by kernels in place; None, or why CUDA refuses."""
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _MAPPED))
        if code:
            with contextlib.suppress(RuntimeError):  # CUDA reports the refusal once more, to whatever is launched next
                torch.ones(1, device=self.device)
            return f"CUDA error {code}"
        self.borders = sorted({*self.borders, address, address + nbytes})
        return None

    def unlock(self, address: int) -> None:
        """Undo :meth:`lock`, after every copy that is on its way."""
        with contextlib.suppress(RuntimeError):  # a card that has failed copies nothing any more
            torch.cuda.synchronize(self.device)
        torch.cuda.cudart().cudaHostUnregister(address)

    def twin(self) -> CudaDevice:
        twin = CudaDevice(self.device.index)
        twin.borders, twin.events = self.borders, self.events
        twin._base, twin._base_s = self._base, self._base_s  # an event's time is kept: whoever asks, it is of one clock
        return twin

    def copying(self) -> AbstractContextManager[object]:
        self.copies.query()  # makes the card's context the thread's own
        return torch.cuda.stream(self.copies)  # the current stream is the thread's own; to change it at every copy costs as much as one

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        start, end, borders = src.data_ptr(), src.data_ptr() + src.numel(), self.borders
        locked = bool(borders) and borders[0] <= start and end <= borders[-1]  # a copy from other memory holds its thread up
        if locked and bisect_right(borders, start) == bisect_left(borders, end):
            self._bare(dst.data_ptr(), start, src.numel())  # nearly always; to find that out by parts takes as long as a copy
            return
        for to, from_ in split_copy(dst, src, borders):
            to.copy_(from_, non_blocking=True)

    @cached_property
    def _bare(self) -> BareCopies:
        return BareCopies(self.copies.cuda_stream)

    def copy_parts(self, into: torch.Tensor, source: torch.Tensor, segments: Iterable[Segment]) -> None:
        bare, to, begin, borders = self._bare, into.data_ptr(), source.data_ptr(), self.borders
        whole = self.in_one_piece(begin, source.numel())
        for s in segments:
            if whole:
                bare(to + s.dst, begin + s.src, s.nbytes)
            else:
                for at, nbytes in split_at(borders, begin + s.src, s.nbytes):
                    bare(to + s.dst + at, begin + s.src + at, nbytes)

    def driver_calls(self) -> DriverCalls | None:
        self.copies.query()  # makes the card's context the thread's own
        return DriverCalls.of(self.copies.cuda_stream, self._compute.cuda_stream, self._word.data_ptr())

    @cached_property
    def _word(self) -> torch.Tensor:
        """That C has the copy stream write: the device keeps it."""
        return torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def in_one_piece(self, begin: int, nbytes: int) -> bool:
        return bisect_right(self.borders, begin) == bisect_left(self.borders, begin + nbytes)

    def event_ahead(self) -> tuple[CardEvent, int]:
        return self.events.ahead(self.copies)

    def copy_event(self) -> CardEvent:
        return self.events.record(self.copies)

    def compute_event(self) -> CardEvent:
        return self.events.record(self._compute)

    def idle_point(self) -> HostPoint:
        return HostPoint(time.perf_counter() - self._base_s)

    def copy_waits(self, event: CardEvent | HostPoint) -> None:
        event.before(self.copies)

    def compute_waits(self, event: CardEvent | HostPoint) -> None:
        event.before(self._compute)

    def compute_waits_for(self, flag: torch.Tensor, value: int) -> None:
        wait_for_value(self._compute.cuda_stream, flag.data_ptr(), value)

    def compute_writes(self, flag: torch.Tensor, value: int) -> None:
        write_value(self._compute.cuda_stream, flag.data_ptr(), value)

    def host_waits(self, event: CardEvent | HostPoint) -> None:
        event.wait()

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(_HostBytes(host), device=self.device)

    def done(self, event: CardEvent | HostPoint) -> bool:
        return event.done()

    def note_done(self, events: Iterable[CardEvent]) -> None:
        for event in events:
            event.happened = True

    def time_of(self, event: CardEvent | HostPoint) -> float:
        return self._base_s + event.seconds_after(self._base)

    def time_of_driver(self, event: torch.cuda.Event) -> float:
        """The same of an event of the driver, each time anew."""
        return self._base_s + self._base.seconds_until(event)


class CudaLane:
    """A CUDA stream for copies of KV: below the weights' one, which has the higher priority."""

    def __init__(self, card: CudaDevice):
        self._card = card
        self._stream = torch.cuda.Stream(card.device)

    def copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.cuda.stream(self._stream):
            for dst, src in copies:
                for to, from_ in split_copy(dst, src, self._card.borders):
                    to.copy_(from_, non_blocking=True)

    def event(self) -> CardEvent:
        return self._card.events.record(self._stream)

    def waits(self, event: CardEvent) -> None:
        event.before(self._stream)


def split_copy(dst: torch.Tensor, src: torch.Tensor, borders: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a copy between uint8 tensors, cut where the one in DRAM crosses one of the ascending addresses ``borders``: CUDA refuses a
    copy from or to memory that was page-locked in two pieces."""
    start = (src if src.is_cpu else dst).data_ptr()
    for at, nbytes in split_at(borders, start, src.numel()):
        yield dst[at : at + nbytes], src[at : at + nbytes]


def split_at(borders: Sequence[int], start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """(begin, bytes) of the parts of ``nbytes`` from address ``start`` on, which the ascending addresses ``borders`` cut; counted from
    ``start``."""
    at = 0
    for border in borders[bisect_right(borders, start) : bisect_left(borders, start + nbytes)]:
        yield at, border - start - at
        at = border - start
    yield at, nbytes - at


class _HostBytes:
    """Registered host memory under its device address, which unified addressing makes the same."""

    def __init__(self, host: torch.Tensor):
        self._host = host
        self.__cuda_array_interface__ = {"shape": (host.numel(),), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3}
