"""Pages in transit from disk to DRAM, ahead of whoever needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.runtime.kv.disk.disk_pages import DiskPages
from penstock.runtime.kv.pages.dram_pages import DramPages


def fetch(keys: Iterable[bytes], disk: DiskPages, dram: DramPages, threads: ThreadPoolExecutor) -> list[Future[None]]:
    """Read ``keys`` to DRAM behind everyone's back, those for which a slot is to be had. Nobody holds them there."""
    return [threads.submit(_fetch, key, disk, dram) for key in keys]


def _fetch(key: bytes, disk: DiskPages, dram: DramPages) -> None:
    taken = dram.slots.take(key)
    if taken is None:
        return
    checksum = None
    try:
        checksum = disk.read(key, dram.view(taken.slot))
    finally:
        if checksum is None:
            dram.slots.abandon(key)
    if checksum is not None:
        dram.seal(taken.slot, checksum)
        dram.slots.publish(key)


class ReadAhead:
    """Reads ``keys`` from ``disk`` in this order, each into a slot of ``dram``, on ``threads``: ``depth`` pages are being read or wait to
    be taken, fewer where there are fewer slots. To be closed."""

    def __init__(self, keys: Iterable[bytes], disk: DiskPages | None, dram: DramPages, threads: ThreadPoolExecutor, depth: int):
        self._wanted = deque(keys)
        self._disk, self._dram, self._threads, self._depth = disk, dram, threads, depth
        self._reading: dict[bytes, tuple[int, Future[bool]]] = {}
        self._top_up()

    def take(self, key: bytes, free_one: Callable[[], bool]) -> int | None:
        """The slot of the page ``key``, held, once it was read; None when it is not to be had. While there is no slot to read it into,
        ``free_one`` is called, which gives one back or says that it has none."""
        while key not in self._reading and not self._begin(key):
            if self._disk is None or key in self._dram.slots or not free_one():
                return None
        self._top_up()
        slot, read = self._reading.pop(key)
        there = read.result()
        if there:
            self._dram.slots.publish(key, hold=True)
        else:
            self._dram.slots.abandon(key)
        self._top_up()
        return slot if there else None

    def close(self) -> None:
        """Wait for what is being read; what came stays in DRAM."""
        for key, (_, read) in self._reading.items():
            (self._dram.slots.publish if read.result() else self._dram.slots.abandon)(key)
        self._reading.clear()

    def _top_up(self) -> None:
        while self._wanted and len(self._reading) < self._depth:
            if self._wanted[0] not in self._dram.slots and not self._begin(self._wanted[0]):
                return
            self._wanted.popleft()

    def _begin(self, key: bytes) -> bool:
        if self._disk is None:
            return False
        taken = self._dram.slots.take(key)
        if taken is not None:
            self._reading[key] = taken.slot, self._threads.submit(self._read, self._disk, key, taken.slot)
        return taken is not None

    def _read(self, disk: DiskPages, key: bytes, slot: int) -> bool:
        checksum = disk.read(key, self._dram.view(slot))
        if checksum is not None:
            self._dram.seal(slot, checksum)
        return checksum is not None
