"""The DRAM cache: layer slots under a policy. Never more layers than slots, by construction."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Protocol

from planner.errors import UserError
from planner.policy import Evict, LayerPolicy, Load


class LayerReader(Protocol):
    """Starts reading a whole layer into a slot and calls ``done(error)`` from any thread when it lies there."""

    def __call__(self, layer: int, slot: int, done: Callable[[BaseException | None], None]) -> None: ...


class _State(Enum):
    loading = auto()
    ready = auto()


@dataclass(eq=False)
class _Held:
    layer: int
    slot: int
    state: _State = _State.loading
    users: int = 0
    """Visits that have not left it: the next one may begin before the last one has."""
    leaving: bool = False


@dataclass
class CacheStats:
    """What the DRAM cache did; ``peak_layers`` is the most slots that ever held or awaited bytes."""

    hits: int = 0
    misses: int = 0
    loads: int = 0
    evictions_out_of_window: int = 0
    evictions_in_window: int = 0
    shrinks: int = 0
    waits: int = 0
    wait_s: float = 0.0
    peak_layers: int = 0
    warm_layers: int = 0
    """Layers of the first fill that had arrived when compute began."""
    accesses: int = 0
    log: list[tuple[str, int]] = field(default_factory=list)
    """Loads and evictions in the order the policy gave them, kept only when asked for."""


class LayerCache:
    """Runs a policy's answers against real slots: loads in order, slots reused once their layer was left.

    ``acquire`` and ``release`` are called by one consumer thread; reads complete on others. A load waits only for a free slot,
    never for another load, so the SSD queue does not drain between layers.
    """

    def __init__(
        self, policy: LayerPolicy, slots: int, read: LayerReader, say: Callable[[str], None] | None = None, keep_log: bool = False
    ):
        self.stats = CacheStats()
        self._policy = policy
        self._read = read
        self._say = say
        self._keep_log = keep_log
        self._free = deque(range(slots))
        self._slots = slots
        self._held: dict[int, _Held] = {}
        self._in_use: dict[int, deque[_Held]] = {}
        self._pending: deque[int] = deque()
        self._first: tuple[int, ...] = ()
        self._lock = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False

    def preload(self, wait: bool, progress: Callable[[int, int], None] | None = None, read: LayerReader | None = None) -> None:
        """Start the policy's first layers (with ``read`` in place of the usual reader) and, with ``wait``, await them."""
        self._first = self._policy.preload()
        with self._lock:
            self._pending.extend(self._first)
            self._note_loads(self._first)
            started = self._start()
        self._issue(started, read)
        if wait:
            self.wait_preloaded(progress)

    def wait_preloaded(self, progress: Callable[[int, int], None] | None = None, layers: int | None = None) -> None:
        """Return when the first ``layers`` that :meth:`preload` started have arrived; None awaits all of them."""
        wanted = self._first[:layers]
        while True:
            with self._lock:
                self._raise_if_broken()
                arrived = sum(map(self._is_ready, wanted))
                if progress:
                    progress(arrived, len(wanted))
                if arrived == len(wanted):
                    self.stats.warm_layers = sum(map(self._is_ready, self._first))
                    return
                self._lock.wait(0.5)

    def holds(self, layer: int) -> bool:
        """Whether :meth:`acquire` would not have to wait for ``layer``."""
        with self._lock:
            return self._is_ready(layer)

    def acquire(self, layer: int) -> int:
        """Slot of ``layer``, which stays there until :meth:`release`. Blocks until the layer has arrived."""
        with self._lock:
            self._raise_if_broken()
            step = self._policy.access(layer)
            self.stats.accesses += 1
            self.stats.hits += step.hit
            self.stats.misses += not step.hit
            if step.shrink:
                self.stats.shrinks += 1
                self._tell(f"DRAM cache shrink: current={layer}, count={len(self._held)}")
            if not step.hit:
                self._tell(f"layer {layer}: timeout, loading immediately")
            for action in step.actions:
                if isinstance(action, Load):
                    self._pending.append(action.layer)
                    self._note_loads((action.layer,))
                else:
                    self._evict(action)
            started = self._start()
        self._issue(started)
        with self._lock:
            begun = time.perf_counter()
            waited = False
            while True:
                self._raise_if_broken()
                if self._is_ready(layer):
                    break
                waited = True
                self._lock.wait(1.0)
            if waited:
                self.stats.waits += 1
                self.stats.wait_s += time.perf_counter() - begun
            held = self._held[layer]
            held.users += 1
            self._in_use.setdefault(layer, deque()).append(held)
            return held.slot

    def release(self, layer: int) -> None:
        """The consumer has left ``layer``, its earliest visit first; its slot may be reused once the policy evicts it."""
        with self._lock:
            held = self._in_use[layer].popleft()
            held.users -= 1
            self._reclaim(held)
            started = self._start()
        self._issue(started)

    def close(self) -> None:
        """Wake every waiter with an error; reads under way are the reader's to end."""
        with self._lock:
            self._closed = True
            self._pending.clear()
            self._lock.notify_all()

    def _evict(self, action: Evict) -> None:
        held = self._held.pop(action.layer, None)
        if self._keep_log:
            self.stats.log.append(("evict", action.layer))
        if action.in_window:
            self.stats.evictions_in_window += 1
            self._tell(f"evict (in window, LRU): layer {action.layer}")
        else:
            self.stats.evictions_out_of_window += 1
            self._tell(f"evict (out of window): layer {action.layer}")
        if held is None:
            self._pending.remove(action.layer)
            return
        held.leaving = True
        self._reclaim(held)

    def _reclaim(self, held: _Held) -> None:
        if held.leaving and not held.users and held.state is _State.ready:
            self._free.append(held.slot)

    def _is_ready(self, layer: int) -> bool:
        return layer in self._held and self._held[layer].state is _State.ready

    def _start(self) -> list[_Held]:
        started = []
        while self._pending and self._free:
            layer = self._pending.popleft()
            held = _Held(layer, self._free.popleft())
            self._held[layer] = held
            started.append(held)
        self.stats.peak_layers = max(self.stats.peak_layers, self._slots - len(self._free))
        return started

    def _issue(self, started: Sequence[_Held], read: LayerReader | None = None) -> None:
        for held in started:
            (read or self._read)(held.layer, held.slot, partial(self._arrived, held))

    def _arrived(self, held: _Held, error: BaseException | None) -> None:
        with self._lock:
            if error is not None:
                self._error = error
            else:
                held.state = _State.ready
                self._tell(f"loaded layer {held.layer} to DRAM cache")
                self._reclaim(held)
            started = [] if error else self._start()
            self._lock.notify_all()
        self._issue(started)

    def _note_loads(self, layers: Sequence[int]) -> None:
        self.stats.loads += len(layers)
        if self._keep_log:
            self.stats.log += [("load", layer) for layer in layers]

    def _tell(self, line: str) -> None:
        if self._say:
            self._say(line)

    def _raise_if_broken(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise UserError("the weight stream was stopped")
