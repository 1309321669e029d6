"""Filling fixed places from the SSD: DRAM regions directly, VRAM through a few page-locked bounce buffers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from planner.units import ALIGN, align_down
from runtime.device import CopyDevice
from runtime.ring import Segment
from runtime.store.base import Extent, UnitLayout
from runtime.store.reader import ReadPool


class Arrival:
    """A read under way; :meth:`wait` returns when it is over and raises what it raised."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._error: BaseException | None = None

    def __call__(self, error: BaseException | None) -> None:
        self._error = error
        self._event.set()

    def wait(self) -> None:
        while not self._event.wait(1.0):
            pass
        if self._error is not None:
            raise self._error


def start_reads(pool: ReadPool, reads: Iterable[tuple[Sequence[Extent], memoryview]]) -> list[tuple[Arrival, int]]:
    """Queue every read; (arrival, bytes) of each."""
    under_way: list[tuple[Arrival, int]] = []
    for extents, view in reads:
        under_way.append((Arrival(), sum(e.nbytes for e in extents)))
        pool.read(extents, view, under_way[-1][0], try_cached=True)
    return under_way


@dataclass(frozen=True)
class Fill:
    """A layout's bytes to bring to ``dst`` (VRAM, uint8); ``segments`` say which layout offset goes where in it."""

    layout: UnitLayout
    segments: Sequence[Segment]
    dst: torch.Tensor


class Filler:
    """Streams fills SSD -> bounce buffer -> VRAM with as many pieces under way as there are bounce buffers.

    Needs no DRAM but the buffers, however large the tensor.
    """

    def __init__(self, pool: ReadPool, bounces: Sequence[tuple[memoryview, torch.Tensor]], device: CopyDevice):
        self._pool = pool
        self._bounces = bounces
        self._device = device

    def run(self, fills: Iterable[Fill], progress: Callable[[int], None]) -> None:
        """Returns when every byte has been queued for its place; kernels issued later see them."""
        piece_bytes = align_down(min(len(view) for view, _ in self._bounces)) - ALIGN
        free = deque((view, tensor, None) for view, tensor in self._bounces)
        under_way: deque = deque()

        def retire() -> None:
            arrival, view, tensor, extent, fill = under_way.popleft()
            arrival.wait()
            for s in _crossing(fill.segments, extent, piece_shift=extent.offset % ALIGN):
                self._device.copy(fill.dst[s.dst : s.dst + s.nbytes], tensor[s.src : s.src + s.nbytes])
            free.append((view, tensor, self._device.copy_event()))
            progress(extent.nbytes)

        for fill in fills:
            for extent in _pieces(fill.layout.extents, piece_bytes):
                if not free:
                    retire()
                view, tensor, copied = free.popleft()
                if copied is not None:
                    self._device.host_waits(copied)
                arrival = Arrival()
                landed = replace(extent, dest=extent.offset % ALIGN, owns_pages=True)
                self._pool.read((landed,), view, arrival, try_cached=True)
                under_way.append((arrival, view, tensor, extent, fill))
        while under_way:
            retire()
        last = self._device.copy_event()
        self._device.compute_waits(last)
        self._device.host_waits(last)


def _pieces(extents: Sequence[Extent], piece_bytes: int) -> Iterator[Extent]:
    """Cut extents at 4096-byte file boundaries into pieces of at most ``piece_bytes``, ``dest`` kept in layout offsets."""
    for e in extents:
        start = e.offset
        while start < e.offset + e.nbytes:
            end = min(align_down(start + piece_bytes), e.offset + e.nbytes)
            yield replace(e, offset=start, nbytes=end - start, dest=e.dest + start - e.offset)
            start = end


def _crossing(segments: Sequence[Segment], piece: Extent, piece_shift: int) -> Iterator[Segment]:
    """The parts of ``segments`` that ``piece`` carries; ``src`` becomes an offset in the bounce buffer."""
    for s in segments:
        first, last = max(s.src, piece.dest), min(s.src + s.nbytes, piece.dest + piece.nbytes)
        if first < last:
            yield Segment(first - piece.dest + piece_shift, s.dst + first - s.src, last - first)
