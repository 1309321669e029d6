"""DRAM that is taken once: one anonymous mapping, faulted in by several threads, page-locked once."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from planner.errors import UserError
from planner.units import ALIGN, align_up, show_bytes

_MADV_POPULATE_WRITE = 23
_FAULT_STRIDE = 64 << 20
_MAPPED = 2  # cudaHostRegisterMapped: kernels may read it in place


class Arena:
    """``nbytes`` of host memory, handed out in 4096-aligned regions and never returned before :meth:`close`.

    With ``pin`` the mapping is registered with CUDA, so copies from it run at the link's full rate. Costs exactly ``nbytes`` of
    DRAM, resident from the start: a plan that does not fit fails here and not in the middle of a run.
    """

    def __init__(self, nbytes: int, pin: bool):
        self.nbytes = max(align_up(nbytes), ALIGN)
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise UserError(f"{show_bytes(nbytes)} of DRAM: {error.strerror}; lower hardware.dram_bytes and solve again") from error
        with contextlib.suppress(OSError, AttributeError):  # a kernel without transparent huge pages: small ones serve
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.view = memoryview(self._map)
        self._used = 0
        self._pinned = False
        self._fault_in()
        if pin:
            self._register()

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
            list(threads.map(fault, range(0, self.nbytes, _FAULT_STRIDE)))

    def _register(self) -> None:
        result = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.nbytes, _MAPPED))
        if result != 0:
            raise UserError(
                f"page-locking {show_bytes(self.nbytes)} was refused (CUDA error {result}); raise `ulimit -l` or lower hardware.dram_bytes"
            )
        self._pinned = True

    def close(self) -> None:
        """Undo the page-locking; the mapping goes when its last tensor does."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
            self._pinned = False
