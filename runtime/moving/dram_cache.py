"""The DRAM cache: layer slots under a policy. Never more layers than slots, by construction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from penstock.planner.common.errors import UserError
from penstock.planner.contract.policy import LayerPolicy
from penstock.planner.contract.policy.layer_slots import CacheStats, Held, LayerSlots


class LayerReader(Protocol):
    """Starts reading a whole layer into a slot and calls ``done(error)`` from any thread when it lies there."""

    def __call__(self, layer: int, slot: int, done: Callable[[BaseException | None], None]) -> None: ...


class LayerCache:
    """Runs a policy's answers against real slots: loads in order, slots reused once their layer was left.

    ``acquire`` and ``release`` are called by one consumer thread; reads complete on others. A load waits only for a free slot,
    never for another load, so the SSD queue does not drain between layers.
    """

    def __init__(
        self, policy: LayerPolicy, slots: int, read: LayerReader, say: Callable[[str], None] | None = None, keep_log: bool = False
    ):
        self._slots = LayerSlots(policy, slots, say, keep_log)
        self._read = read
        self._lock = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False

    @property
    def stats(self) -> CacheStats:
        return self._slots.stats

    def preload(self, wait: bool, progress: Callable[[int, int], None] | None = None, read: LayerReader | None = None) -> None:
        """Start the policy's first layers (with ``read`` in place of the usual reader) and, with ``wait``, await them."""
        with self._lock:
            started = self._slots.preload()
        self._issue(started, read)
        if wait:
            self.wait_preloaded(progress)

    def wait_preloaded(self, progress: Callable[[int, int], None] | None = None, layers: int | None = None) -> None:
        """Return when the first ``layers`` that :meth:`preload` started have arrived; None awaits all of them, which are to be there at the
        same time: before the first pass, or where all of them stay."""
        self.wait_for(self._slots.first[:layers], progress)
        with self._lock:
            self.stats.warm_layers = sum(map(self._slots.is_ready, self._slots.first))

    def wait_for(self, wanted: Collection[int], progress: Callable[[int, int], None] | None = None) -> None:
        """Return when all ``wanted`` layers lie in their slots, where nobody has to ask for them."""
        while True:
            with self._lock:
                self._raise_if_broken()
                arrived = sum(map(self._slots.is_ready, wanted))
                if progress:
                    progress(arrived, len(wanted))
                if arrived == len(wanted):
                    return
                self._lock.wait(0.5)

    def holds(self, layer: int) -> bool:
        """Whether :meth:`acquire` would not have to wait for ``layer``."""
        with self._lock:
            return self._slots.is_ready(layer)

    def slot_of(self, layer: int) -> int:
        """The slot of ``layer``, which was loaded or is on its way."""
        with self._lock:
            return self._slots.slot_of(layer)

    def acquire(self, layer: int) -> int:
        """Slot of ``layer``, which stays there until :meth:`release`. Blocks until the layer has arrived."""
        with self._lock:
            self._raise_if_broken()
            started = self._slots.access(layer)
        self._issue(started)
        with self._lock:
            begun = time.perf_counter()
            waited = False
            while True:
                self._raise_if_broken()
                if self._slots.is_ready(layer):
                    break
                waited = True
                self._lock.wait(1.0)
            if waited:
                self.stats.waits += 1
                self.stats.wait_s += time.perf_counter() - begun
            return self._slots.take(layer)

    def release(self, layer: int) -> None:
        """The consumer has left ``layer``, its earliest visit first; its slot may be reused once the policy evicts it."""
        with self._lock:
            started = self._slots.leave(layer)
        self._issue(started)

    def close(self) -> None:
        """Wake every waiter with an error; reads in flight are the reader's to end."""
        with self._lock:
            self._closed = True
            self._slots.forget()
            self._lock.notify_all()

    def _issue(self, started: Sequence[Held], read: LayerReader | None = None) -> None:
        for held in started:  # without the lock: a read that ends at once calls :meth:`_arrived` from here
            (read or self._read)(held.layer, held.slot, partial(self._arrived, held))

    def _arrived(self, held: Held, error: BaseException | None) -> None:
        with self._lock:
            started: list[Held] = []
            if error is not None:
                self._error = error
            else:
                started = self._slots.arrived(held)
            self._lock.notify_all()
        self._issue(started)

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise UserError("the weight stream was stopped")
