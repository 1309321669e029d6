"""Filling fixed places from the SSD: DRAM regions directly, VRAM through a few page-locked bounce buffers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.planner.common.measures import ALIGN, align_down
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.memory.pieces import Segment, within
from penstock.runtime.reading.blocks import pieces_of
from penstock.runtime.reading.reader import Reads
from penstock.runtime.reading.store_errors import StoreError
from penstock.runtime.store.base import Extent, UnitLayout


class Arrival:
    """A read in flight; :meth:`wait` returns when it is over and raises what it raised."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._error: BaseException | None = None

    def __call__(self, error: BaseException | None) -> None:
        self._error = error
        self._event.set()

    def wait(self) -> None:
        while not self.within(1.0):
            pass

    def within(self, seconds: float) -> bool:
        """Whether it is over after so many seconds at most; raises what it raised."""
        if not self._event.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True


def start_reads(source: Reads, reads: Iterable[tuple[Sequence[Extent], memoryview]]) -> list[tuple[Arrival, int]]:
    """Queue every read; (arrival, bytes) of each."""
    under_way: list[tuple[Arrival, int]] = []
    for extents, view in reads:
        under_way.append((Arrival(), sum(e.nbytes for e in extents)))
        source.read(extents, view, under_way[-1][0])
    return under_way


@dataclass(frozen=True)
class Fill:
    """A layout's bytes to bring to ``dst`` (VRAM, uint8); ``segments`` say which layout offset goes where in it."""

    layout: UnitLayout
    segments: Sequence[Segment]
    dst: torch.Tensor


class Filler:
    """Streams fills SSD -> bounce buffer -> VRAM on a thread of its own, with as many pieces in flight as there are bounce buffers.

    Needs no DRAM but the buffers, however large the tensor.
    """

    def __init__(self, source: Reads, bounces: Sequence[tuple[memoryview, torch.Tensor]], device: CopyDevice, fills: Iterable[Fill]):
        self.over = Arrival()
        """Arrives when every byte lies in its place."""
        self.filled_bytes = 0
        self._fills = list(fills)
        self.total_bytes = sum(fill.layout.payload_bytes for fill in self._fills)
        self.seconds = 0.0
        self._source = source
        self._bounces = bounces
        self._device = device
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="penstock-fill", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop without waiting for reads in flight: they are the reader's to end."""
        self._stopped = True
        self._thread.join()

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise StoreError("loading was stopped")

    def _work(self) -> None:
        begun = time.perf_counter()
        error: BaseException | None = None
        try:
            with self._device.copying():
                self.run()
        except BaseException as caught:  # handed to whoever waits
            error = caught
        self.seconds = time.perf_counter() - begun
        self.over(error)

    def run(self) -> None:
        """Returns when every byte lies in its place; kernels issued later see them."""
        piece_bytes = align_down(min(len(view) for view, _ in self._bounces)) - ALIGN
        free: deque[tuple[memoryview, torch.Tensor, Event | None]] = deque((view, tensor, None) for view, tensor in self._bounces)
        under_way: deque[tuple[Arrival, memoryview, torch.Tensor, Extent, Fill]] = deque()

        def retire() -> None:
            arrival, view, tensor, extent, fill = under_way.popleft()
            while not arrival.within(0.1):
                self._raise_if_stopped()
            for s in within(fill.segments, extent.dest, extent.nbytes):
                landed = s.src - extent.dest + extent.offset % ALIGN
                self._device.copy(fill.dst[s.dst : s.dst + s.nbytes], tensor[landed : landed + s.nbytes])
            free.append((view, tensor, self._device.copy_event()))
            self.filled_bytes += extent.nbytes

        for fill in self._fills:
            for extent in (piece for e in fill.layout.extents for piece in pieces_of(e, piece_bytes)):
                self._raise_if_stopped()
                if not free:
                    retire()
                view, tensor, copied = free.popleft()
                if copied is not None:
                    self._device.host_waits(copied)
                arrival = Arrival()
                landed = replace(extent, dest=extent.offset % ALIGN, owns_pages=True)
                self._source.read((landed,), view, arrival)
                under_way.append((arrival, view, tensor, extent, fill))
        while under_way:
            retire()
        last = self._device.copy_event()
        self._device.compute_waits(last)
        self._device.host_waits(last)
