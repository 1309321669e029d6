"""DRAM that is taken once: one anonymous mapping, faulted in by several threads, page-locked once."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from penstock.planner.common.errors import UserError
from penstock.planner.common.host_memory import usable_cores
from penstock.planner.common.interrupt import uninterrupted
from penstock.planner.common.measures import ALIGN, align_down, align_up, show_bytes

if TYPE_CHECKING:
    import torch

_SMALLEST_SHARE = 64 << 20
_LARGEST_SHARE = 1 << 30
"""Bytes that one thread faults in before it looks whether it is to stop: a signal waits for one share."""
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

    Costs nothing until :meth:`begin`, then exactly ``nbytes`` of DRAM. Needs torch only for :meth:`slice`.
    """

    def __init__(self, nbytes: int):
        self.nbytes = max(align_up(nbytes), ALIGN)
        self.locked_bytes = 0
        """Page-locked, from the start of the mapping on."""
        self.refused: str | None = None
        """Why not all of it is page-locked, where it was to be."""
        self.fault_s = 0.0
        """Seconds from :meth:`begin` until all of it was there."""
        self.lock_s = 0.0
        """Seconds that page-locking took."""
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UserError(f"{show_bytes(nbytes)} of DRAM: {error.strerror}; lower hardware.dram_bytes and solve again") from error
        with contextlib.suppress(OSError, AttributeError):  # a kernel without transparent huge pages: small ones serve
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._used = 0
        self._lock: PageLock | None = None
        self._pieces: list[int] = []
        self._threads: list[threading.Thread] = []
        self._closing = False

    @cached_property
    def tensor(self) -> torch.Tensor:
        """All of it as uint8."""
        import torch

        return torch.frombuffer(self._map, dtype=torch.uint8)

    def occupy(self, lock: PageLock | None = None) -> None:
        """Make all of it resident and, with ``lock``, page-lock it. To be closed, whatever happens."""
        self.begin()
        self.wait()
        if lock is not None:
            self.lock_pages(lock)

    def begin(self) -> None:
        """Start to fault all of it in, on half of the cores: more of them take longer. Must be closed.

        Each 4096-byte page is written to. ``madvise`` would hold the lock of the address space, which every library that is loaded
        meanwhile needs.
        """
        cores = max(1, usable_cores() // 2)
        share = min(max(align_up(-(-self.nbytes // cores)), _SMALLEST_SHARE), _LARGEST_SHARE)
        shares = deque(range(0, self.nbytes, share))
        begun = time.perf_counter()

        def fault() -> None:
            with contextlib.suppress(IndexError):
                while not self._closing:
                    start = shares.popleft()
                    # releases the interpreter's lock, so imports go on beside it
                    ctypes.memset(self.address + start, 0, min(share, self.nbytes - start))
                    self.fault_s = time.perf_counter() - begun

        with uninterrupted():
            for i in range(min(len(shares), cores)):
                self._threads.append(threading.Thread(target=fault, name=f"penstock-dram-{i}", daemon=True))
                self._threads[-1].start()

    def wait(self) -> None:
        """Return when all of it is resident."""
        for thread in self._threads:
            thread.join()

    def lock_pages(self, lock: PageLock) -> None:
        """Page-lock what is resident, so that copies from it run at the link's full rate. If the whole is refused, lock its beginning in
        smaller pieces, as far as that is granted. The rest stays pageable."""
        begun = time.perf_counter()
        self._lock = lock
        size = self.nbytes
        while self.locked_bytes < self.nbytes and not self._closing:
            address = self.address + self.locked_bytes
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
                break
        if self.locked_bytes == self.nbytes:
            self.refused = None
        self.lock_s = time.perf_counter() - begun

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

    def is_locked(self, offset: int, nbytes: int) -> bool:
        """Whether a device may read [offset, offset + nbytes) in place."""
        return offset + nbytes <= self.locked_bytes

    def stop(self) -> None:
        """End what :meth:`begin` and :meth:`lock_pages` do on other threads, at the next share or piece."""
        self._closing = True

    def close(self) -> None:
        """Undo the page-locking and give the DRAM back; the mapping, empty, goes when its last tensor does. Nothing may use it any more."""
        self.stop()
        self.wait()
        while self._pieces:
            assert self._lock is not None, "it locked the pieces"
            self._lock.unlock(self._pieces.pop())
        self.locked_bytes = 0
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes), mmap.MADV_DONTNEED)
