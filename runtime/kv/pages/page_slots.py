"""Which page lies in which of a tier's slots: bookkeeping alone, the same for VRAM and DRAM."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import NamedTuple


class Taken(NamedTuple):
    slot: int
    evicted: bytes | None
    """Key of the page that lay there."""


class Slots:
    """``count`` equal slots. When none is free, a new page takes the one whose page was used longest ago. Thread-safe; nothing here waits.

    A slot that is taken is nobody's to find until it is published. A slot that is held keeps its bytes until it was released as often.
    """

    def __init__(self, count: int):
        self.count = count
        self._lock = threading.Lock()
        self._free = list(range(count - 1, -1, -1))
        self._ready: OrderedDict[bytes, int] = OrderedDict()
        """Slots by key, least recently used first."""
        self._filling: dict[bytes, int] = {}
        self._holds: Counter[int] = Counter()
        self._dropped: set[int] = set()
        """Held slots without a page, free once they are released."""

    def __contains__(self, key: bytes) -> bool:
        """Whether the page is there, or about to be."""
        with self._lock:
            return key in self._ready or key in self._filling

    def __len__(self) -> int:
        """Pages that can be found."""
        return len(self._ready)

    def find(self, key: bytes) -> int | None:
        """The slot of a page that was published, which counts as a use."""
        with self._lock:
            if key in self._ready:
                self._ready.move_to_end(key)
            return self._ready.get(key)

    def hold(self, key: bytes) -> int | None:
        """``find``, and the slot keeps its bytes until ``release``."""
        with self._lock:
            slot = self._ready.get(key)
            if slot is not None:
                self._ready.move_to_end(key)
                self._holds[slot] += 1
            return slot

    def release(self, slot: int) -> None:
        """Undo one ``hold``."""
        with self._lock:
            self._holds[slot] -= 1
            if not self._holds[slot]:
                del self._holds[slot]
                if slot in self._dropped:
                    self._dropped.discard(slot)
                    self._free.append(slot)

    def take(self, key: bytes, leave: int = 0) -> Taken | None:
        """A slot to fill with the page ``key``. None when the page is there or about to be, or when no more than ``leave`` slots could be
        given away."""
        with self._lock:
            if key in self._ready or key in self._filling or len(self._free) + self._evictable() <= leave:
                return None
            evicted = None
            if self._free:
                slot = self._free.pop()
            else:
                evicted = next(k for k, s in self._ready.items() if s not in self._holds)
                slot = self._ready.pop(evicted)
            self._filling[key] = slot
            return Taken(slot, evicted)

    def publish(self, key: bytes, hold: bool = False) -> None:
        """The page that a slot was taken for is there, and the last one used; ``hold`` it at once, before anyone can take its slot."""
        with self._lock:
            slot = self._ready[key] = self._filling.pop(key)
            if hold:
                self._holds[slot] += 1

    def abandon(self, key: bytes) -> None:
        """The page that a slot was taken for will not come."""
        with self._lock:
            self._free.append(self._filling.pop(key))

    def drop(self, key: bytes) -> None:
        """The page is no good. Nothing when it is not there."""
        with self._lock:
            slot = self._ready.pop(key, None)
            if slot is not None:
                (self._dropped.add if slot in self._holds else self._free.append)(slot)

    def _evictable(self) -> int:
        return len(self._ready) - (len(self._holds) - len(self._dropped))
