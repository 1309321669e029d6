"""DRAM that is taken once: one anonymous mapping, faulted in by several threads, page-locked once."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import torch

from planner.errors import UserError
from planner.units import ALIGN, align_down, align_up, show_bytes

_MADV_POPULATE_WRITE = 23
_FAULT_STRIDE = 64 << 20
_LARGEST_PIECE = 1 << 30
_SMALLEST_PIECE = 64 << 20
"""Where the whole is refused: page-locked a GiB at a time, then in halves of it, to come close to whatever limit there is."""


@runtime_checkable
class PageLock(Protocol):
    """What locks pages so that a device copies from them at the link's full rate."""

    def lock(self, address: int, nbytes: int) -> str | None:
        """None, or why it was refused."""

    def unlock(self, address: int) -> None:
        """Undo the lock that began at ``address``, once nothing is copied any more."""


class Arena:
    """``nbytes`` of host memory, handed out in 4096-aligned regions and never returned before :meth:`close`.

    Costs nothing until :meth:`occupy`, then exactly ``nbytes`` of DRAM.
    """

    def __init__(self, nbytes: int):
        self.nbytes = max(align_up(nbytes), ALIGN)
        self.locked_bytes = 0
        """Page-locked, from the start of the mapping on."""
        self.refused: str | None = None
        """Why not all of it is page-locked, where it was to be."""
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UserError(f"{show_bytes(nbytes)} of DRAM: {error.strerror}; lower hardware.dram_bytes and solve again") from error
        with contextlib.suppress(OSError, AttributeError):  # a kernel without transparent huge pages: small ones serve
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.view = memoryview(self._map)
        self._used = 0
        self._lock: PageLock | None = None
        self._pieces: list[int] = []

    def occupy(self, lock: PageLock | None = None) -> None:
        """Make all of it resident: a plan that does not fit fails here and not in the middle of a run. To be closed, whatever happens.

        With ``lock`` it is page-locked, so copies from it run at the link's full rate: whole where that is granted, else its
        beginning in smaller pieces as far as that is granted; the rest stays pageable.
        """
        self._fault_in()
        self._lock = lock
        if lock is not None:
            self._lock_pages(lock)

    def take(self, nbytes: int) -> tuple[int, int]:
        """Reserve a region: (offset, nbytes), both multiples of 4096."""
        size = align_up(nbytes)
        offset = self._used
        if offset + size > self.nbytes:
            raise MemoryError(f"arena of {self.nbytes} bytes cannot give {size} more after {offset}")
        self._used += size
        return offset, size

    def slice(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor over [offset, offset + nbytes), sharing memory."""
        return self.tensor[offset : offset + nbytes]

    def _fault_in(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        base = self.tensor.data_ptr()

        def fault(start: int) -> None:
            size = min(_FAULT_STRIDE, self.nbytes - start)
            if libc.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0:
                return
            if ctypes.get_errno() == 12:
                raise UserError(f"DRAM ran out while taking {show_bytes(self.nbytes)}; lower hardware.dram_bytes and solve again")
            ctypes.memset(base + start, 0, size)

        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            try:
                list(threads.map(fault, range(0, self.nbytes, _FAULT_STRIDE)))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _lock_pages(self, lock: PageLock) -> None:
        size = self.nbytes
        while self.locked_bytes < self.nbytes:
            address = self.tensor.data_ptr() + self.locked_bytes
            here = min(size, self.nbytes - self.locked_bytes)
            self._pieces.append(address)  # before: an interrupt between lock and note would leave the pages locked
            why = lock.lock(address, here)
            if why is None:
                self.locked_bytes += here
                continue
            self._pieces.pop()
            self.refused = why
            size = min(_LARGEST_PIECE, align_down(here // 2))
            if size < _SMALLEST_PIECE:
                return
        self.refused = None

    def is_locked(self, offset: int, nbytes: int) -> bool:
        """Whether a device may read [offset, offset + nbytes) in place."""
        return offset + nbytes <= self.locked_bytes

    def close(self) -> None:
        """Undo the page-locking; the mapping goes when its last tensor does."""
        while self._pieces:
            self._lock.unlock(self._pieces.pop())
        self.locked_bytes = 0
