"""The SSD: write rate, and read rate over block size and queue depth, by the runtime's own way of reading.

One thread for each read in flight calls ``preadv`` into its own page-aligned part of the memory that the runtime would read into.
Memory: one write buffer, and where there is no such memory, read buffers of half a GB.
"""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.planner.common.measures import GB, align_down, align_up
from penstock.planner.probe.findings import CannotMeasure
from penstock.planner.probe.scratch_file import LEAST_BYTES, MEMORY, Cursor, Target, file_system

WRITE_BYTES = 8 * 2**20
"""One write."""
WRITE_DEPTH = 2
"""Writes in flight."""
SPREAD_BYTES = 512 * 2**20
"""Read buffers in all, at least, where they have memory of their own: several times the largest processor caches."""
PATTERN_BYTES = 32 * 2**20
"""Random bytes that the scratch file repeats: more than any file system looks back when it compresses."""


def fill_scratch(fd: int, direct: bool, wanted: int, seconds: float, what: str) -> tuple[Target, float]:
    """Write random bytes until ``wanted`` bytes or ``seconds`` are over; returns what was written and the GB/s, flush included.

    A disk that fills up on the way ends the writing; CannotMeasure when less than ``LEAST_BYTES`` were written.
    """
    pattern = mmap.mmap(-1, PATTERN_BYTES)
    pattern.write(os.urandom(PATTERN_BYTES))
    view = memoryview(pattern)
    end = time.perf_counter() + seconds
    stop = threading.Event()
    errors: list[OSError] = []

    size = align_down(wanted, WRITE_BYTES)

    def write(lane: int) -> int:
        """Writes every WRITE_DEPTH-th block; returns the offset of the first that it did not write."""
        for at in range(lane * WRITE_BYTES, size, WRITE_DEPTH * WRITE_BYTES):
            late = time.perf_counter() > end and at >= LEAST_BYTES
            if late or stop.is_set():
                return at
            from_ = at % PATTERN_BYTES
            try:
                if os.pwritev(fd, [view[from_ : from_ + WRITE_BYTES]], at) != WRITE_BYTES:
                    return at
            except OSError as error:
                errors.append(error)
                return at
        return size

    start = time.perf_counter()
    with ThreadPoolExecutor(WRITE_DEPTH) as pool:
        try:
            reached = list(pool.map(write, range(WRITE_DEPTH)))
        finally:
            stop.set()
    os.fsync(fd)
    took = time.perf_counter() - start
    whole = min(reached)
    if whole < LEAST_BYTES:
        raise CannotMeasure(f"the scratch file could not be written: {errors[0].strerror if errors else 'short write'}")
    return Target(((fd, whole),), direct, what, file_system(fd) in MEMORY), whole / GB / took


class Buffers:
    """Aligned read buffers, ``depth`` of at least ``block_bytes``. They are parts of ``memory``, spread over all of it and faulted in
    already. If ``memory`` is too small or None, they lie in a mapping of their own of at least ``SPREAD_BYTES``, touched once. So reads
    land in memory and not in the processor's cache, as in a run. The difference shows where the drive is memory itself."""

    def __init__(self, depth: int, block_bytes: int, memory: mmap.mmap | None = None) -> None:
        self.depth, self.block_bytes = depth, block_bytes
        if memory is None or align_down(len(memory) // depth) < block_bytes:
            memory = _touched(depth * align_up(max(block_bytes, SPREAD_BYTES // depth)))
        self._memory = memory
        self._each = align_down(len(memory) // depth)
        self._at = [0] * depth

    def view(self, index: int, nbytes: int) -> memoryview:
        """``nbytes`` bytes, at most ``block_bytes``, for the next read number ``index`` of those in flight."""
        start = self._at[index] if self._at[index] + nbytes <= self._each else 0
        self._at[index] = start + nbytes
        return memoryview(self._memory)[index * self._each + start :][:nbytes]


def _touched(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes)
    zeros = bytes(PATTERN_BYTES)
    while memory.tell() < nbytes:
        memory.write(zeros[: nbytes - memory.tell()])
    return memory


class ReadLoad:
    """Reads in flight while the ``with`` block runs, at most one pass over a target whose second pass would come from a cache; ``gbps``
    afterwards.

    Raises, on leaving, what a reading thread raised. Every thread completes at least one read.
    """

    def __init__(self, target: Target, cursor: Cursor, buffers: Buffers, block_bytes: int, queue_depth: int) -> None:
        self._target, self._cursor, self._buffers = target, cursor, buffers
        self._block_bytes, self._depth = block_bytes, queue_depth
        self._stop = threading.Event()
        self._done: list[float] = []
        self._errors: list[Exception] = []
        self._ended: list[int] = []
        """Threads that read no more. Python 3.11 takes one for ended that is asked whether it lives while an interrupt comes."""
        self._once = False
        self.gbps = 0.0

    def _read(self, index: int) -> None:
        passes = self._target.nbytes // self._block_bytes
        first = True
        try:
            while first or not (self._stop.is_set() or (self._once and len(self._done) >= passes)):
                fd, at = self._cursor.take(self._block_bytes)
                got = os.preadv(fd, [self._buffers.view(index, self._block_bytes)], at)
                if got != self._block_bytes:
                    raise OSError(f"short read: {got} of {self._block_bytes} bytes at offset {at}")
                self._done.append(time.perf_counter())
                first = False
        except (OSError, CannotMeasure) as error:
            self._errors.append(error)
        finally:
            self._ended.append(index)

    def __enter__(self) -> ReadLoad:
        self._target.drop_cache()
        self._once = not self._target.repeats
        self._start = time.perf_counter()
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(self._depth)]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self._stop.set()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors and kind is None:
            raise self._errors[0]
        if self._done:
            self.gbps = len(self._done) * self._block_bytes / GB / (max(self._done) - self._start)

    def run(self, seconds: float) -> float:
        """Read for ``seconds`` (less when a pass is over) and return GB/s up to the last completed read."""
        with self:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end and self.going():
                time.sleep(min(0.01, seconds))
        return self.gbps

    def going(self) -> bool:
        """Whether anything is still being read."""
        return len(self._ended) < self._depth


SLICE_S = 0.5
"""Of a long read, the time over which its rate is taken."""
STEADY = 0.95
"""Share of the burst's rate from which on a drive has not slowed down."""


@dataclass(frozen=True)
class LongRead:
    """A read without a pause: the rate of each slice, GB/s."""

    slices: tuple[float, ...]

    @property
    def gbps(self) -> float:
        """Of its second half."""
        return statistics.median(self.slices[len(self.slices) // 2 :])

    def burst_s(self, gbps: float) -> float:
        """Seconds until the rate stays below ``STEADY`` of ``gbps``; all of it where it does not."""
        kept = next((i for i in range(len(self.slices), 0, -1) if self.slices[i - 1] >= STEADY * gbps), 0)
        return kept * SLICE_S


def read_long(read: Callable[[float], float], seconds: float, tick: Callable[[], None]) -> LongRead:
    """``read`` goes on for so many seconds and gives the rate; the drive rests for less than a millisecond between two calls."""
    slices = []
    for _ in range(max(2, round(seconds / SLICE_S))):
        slices.append(read(SLICE_S))
        tick()
    return LongRead(tuple(slices))


def read_sampler(target: Target, cursor: Cursor, buffers: Buffers, seconds: float) -> Callable[[int, int], float]:
    """A function (block_bytes, queue_depth) -> GB/s over about ``seconds``, for :func:`penstock.planner.probe.best_block.sweep`."""
    return lambda block_bytes, depth: ReadLoad(target, cursor, buffers, block_bytes, depth).run(seconds)
