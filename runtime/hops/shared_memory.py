"""Memory that the ranks of a host share: one of them makes it, the others open it by its descriptor."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import NamedTuple

import torch

from penstock.planner.common.measures import align_up
from penstock.runtime.memory.arena import PageLock


class Shared(NamedTuple):
    """Where another process of this host finds the memory, as long as its maker lives."""

    process: int
    descriptor: int
    nbytes: int


class SharedMemory:
    """Zeros in whole pages, without a name in any file system: they are gone when the last process is, whatever ends it.

    ``lock`` page-locks them, so that kernels read and write them in place. Costs ``nbytes`` of DRAM, once a host. OSError where this
    process may not open it, RuntimeError where its pages are not locked.
    """

    def __init__(self, given: int | Shared, lock: PageLock | None = None):
        if isinstance(given, int):
            self._descriptor = os.memfd_create("penstock-hops", os.MFD_CLOEXEC)
            self.nbytes = align_up(given)
            os.ftruncate(self._descriptor, self.nbytes)
        else:
            self.nbytes = given.nbytes
            self._descriptor = os.open(f"/proc/{given.process}/fd/{given.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(self._descriptor, self.nbytes)
            self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
            """All of it, uint8."""
            self._lock = lock
            why = None if lock is None else lock.lock(self.bytes.data_ptr(), self.nbytes)
            if why is not None:
                self._lock = None
                raise RuntimeError(f"memory that ranks share is not page-locked: {why}")
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def shared(self) -> Shared:
        """For the others, before this is closed."""
        return Shared(os.getpid(), self._descriptor, self.nbytes)

    def close(self) -> None:
        """Nothing reads or writes it here any more. A second call does nothing."""
        if self._descriptor < 0:
            return
        if self._lock is not None:
            self._lock.unlock(self.bytes.data_ptr())
        self.bytes = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):  # whoever has a name for a part of it keeps the mapping
            self._map.close()
        os.close(self._descriptor)
        self._descriptor = -1
