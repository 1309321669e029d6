"""The host's memory: one anonymous mapping, faulted in, page-locked and copied with all cores."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from penstock.planner.common.measures import GB, align_down, show_bytes
from penstock.planner.probe.findings import CannotMeasure, Figure
from penstock.planner.probe.watched.clocked import median_seconds

MADV_POPULATE_WRITE = 23
"""Linux 5.14: fault in a range for writing in one call. Python's mmap module does not name it."""
HUGE_PAGE_BYTES = 2**21


def libc() -> ctypes.CDLL:
    """The C library. A call through it releases the interpreter's lock, so threads run side by side."""
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mlock.argtypes = library.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    library.memchr.restype = ctypes.c_void_p
    return library


@dataclass(frozen=True)
class Lock:
    """A way to lock pages: ``lock(address, nbytes)`` returns why it was refused (None: it was not)."""

    name: str
    lock: Callable[[int, int], str | None]
    unlock: Callable[[int, int], None]


def mlock() -> Lock:
    """The kernel's own lock, for machines without a GPU."""
    library = libc()

    def lock(address: int, nbytes: int) -> str | None:
        return None if library.mlock(address, nbytes) == 0 else os.strerror(ctypes.get_errno())

    def unlock(address: int, nbytes: int) -> None:
        library.munlock(address, nbytes)

    return Lock("mlock", lock, unlock)


class Arena:
    """An anonymous mapping of ``nbytes`` (whole huge pages), split evenly over ``threads`` that work on it together.

    Not faulted in when made. The mapping lives until the last view of it is gone.
    """

    def __init__(self, nbytes: int, threads: int) -> None:
        self.nbytes = align_down(nbytes, HUGE_PAGE_BYTES)
        if self.nbytes < 2 * threads * HUGE_PAGE_BYTES:
            raise CannotMeasure(f"{show_bytes(nbytes)} of DRAM are too little to measure on")
        self.buffer = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.threads = threads
        self.locked = False
        self._libc = libc()
        self._libc.madvise(self.address, self.nbytes, mmap.MADV_HUGEPAGE)
        self._pool = ThreadPoolExecutor(threads)

    def each(self, work: Callable[[int, int], object], nbytes: int | None = None) -> None:
        """``work(offset, length)`` on every thread's share of the first ``nbytes`` bytes; all are done on return."""
        futures = self.start(work, self.threads, nbytes)
        try:
            for future in futures:
                future.result()
        finally:
            wait(futures)

    def start(self, work: Callable[[int, int], object], threads: int, nbytes: int | None = None) -> list[Future[object]]:
        """``work(offset, length)`` on the shares of so many ``threads``, which go on after return."""
        total = nbytes or self.nbytes
        share = align_down(total // threads, HUGE_PAGE_BYTES)
        ends = [*(i * share for i in range(1, threads)), total]
        return [self._pool.submit(work, i * share, end - i * share) for i, end in enumerate(ends)]

    def read(self, offset: int, length: int) -> None:
        """Read a part of the mapping, all zero: a search for a byte that is not there."""
        self._libc.memchr(self.address + offset, 1, length)

    def _fault_in(self, offset: int, length: int) -> None:
        if self._libc.madvise(self.address + offset, length, MADV_POPULATE_WRITE) != 0:
            ctypes.memset(self.address + offset, 0, length)

    def fault_in(self) -> float:
        """Seconds to fault in every page."""
        start = time.perf_counter()
        self.each(self._fault_in)
        return time.perf_counter() - start

    def fill(self, pattern: bytes) -> None:
        """Repeat ``pattern`` over the mapping (a rest shorter than it keeps its content)."""

        def write(offset: int, length: int) -> None:
            for at in range(offset, offset + length - len(pattern) + 1, len(pattern)):
                ctypes.memmove(self.address + at, pattern, len(pattern))

        self.each(write)

    def pinning(self, lock: Lock) -> Iterator[Figure]:
        """Seconds to fault in and lock one GB."""
        faulted = self.fault_in()
        start = time.perf_counter()
        refused = lock.lock(self.address, self.nbytes)
        locked = time.perf_counter() - start
        self.locked = refused is None
        how = f"{show_bytes(self.nbytes)} anonymous mapping faulted in by {self.threads} threads in {faulted:.2f} s"
        if refused is None:
            yield Figure("dram.pin_s_per_gb", (faulted + locked) / (self.nbytes / GB), f"{how}, {lock.name} in {locked:.2f} s")
        else:
            yield Figure("dram.pin_s_per_gb", faulted / (self.nbytes / GB), f"{how}; fault-in alone: {lock.name} refused ({refused})")

    def rates(self, seconds: float) -> Iterator[Figure]:
        """Copy rate (one half to the other; bytes copied, not bytes moved) in about ``seconds``."""
        half = align_down(self.nbytes // 2, HUGE_PAGE_BYTES)

        def copy(offset: int, length: int) -> None:
            ctypes.memmove(self.address + half + offset, self.address + offset, length)

        took = median_seconds(lambda: self.each(copy, half), seconds)
        yield Figure("dram.copy_gbps", half / GB / took, f"memmove of {show_bytes(half)} by {self.threads} threads, median")

    def close(self, lock: Lock) -> None:
        """Unlock the pages and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self.locked:
            lock.unlock(self.address, self.nbytes)
            self.locked = False
