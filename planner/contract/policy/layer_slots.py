"""A cache policy's answers against real slots: which load starts when, and which slot is free again. No bytes, threads or clocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.planner.contract.policy.base import Evict, LayerPolicy, Load


@dataclass(eq=False)
class Held:
    """A layer in a slot, or on its way there."""

    layer: int
    slot: int
    ready: bool = False
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


class LayerSlots:
    """Loads in the policy's order, each as soon as a slot is free. An evicted layer's slot is free once the layer has arrived and was left.

    Methods that free slots return the loads that may begin: read each of them, then call :meth:`arrived`. A load waits only for a free
    slot, never for another load.
    """

    def __init__(self, policy: LayerPolicy, slots: int, say: Callable[[str], None] | None = None, keep_log: bool = False):
        self.stats = CacheStats()
        self.first: tuple[int, ...] = ()
        """Layers of the first fill."""
        self._policy = policy
        self._say = say
        self._keep_log = keep_log
        self._slots = slots
        self._free = deque(range(slots))
        self._held: dict[int, Held] = {}
        self._in_use: dict[int, deque[Held]] = {}
        self._pending: deque[int] = deque()

    def preload(self) -> list[Held]:
        """The policy's first layers, before any access."""
        self.first = self._policy.preload()
        self._pending.extend(self.first)
        self._note_loads(self.first)
        return self._start()

    def access(self, layer: int) -> list[Held]:
        """The consumer turns to ``layer``; once that is ready it takes it."""
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
        return self._start()

    def is_ready(self, layer: int) -> bool:
        """Whether ``layer`` lies in a slot."""
        return layer in self._held and self._held[layer].ready

    def slot_of(self, layer: int) -> int:
        """The slot of ``layer``, which lies there or is on its way."""
        return self._held[layer].slot

    def take(self, layer: int) -> int:
        """The slot of ``layer``, which is ready: it stays there until :meth:`leave`."""
        held = self._held[layer]
        held.users += 1
        self._in_use.setdefault(layer, deque()).append(held)
        return held.slot

    def leave(self, layer: int) -> list[Held]:
        """The consumer has left ``layer``, its earliest visit first."""
        held = self._in_use[layer].popleft()
        held.users -= 1
        self._reclaim(held)
        return self._start()

    def arrived(self, held: Held) -> list[Held]:
        """A load is over."""
        held.ready = True
        self._tell(f"loaded layer {held.layer} to DRAM cache")
        self._reclaim(held)
        return self._start()

    def forget(self) -> None:
        """No load that has not begun begins any more."""
        self._pending.clear()

    def state(self) -> tuple[object, ...]:
        """All that what comes next depends on, besides the policy and the loads in flight: equal when nothing differs but slots' names."""
        held = tuple((h.layer, h.ready, h.users) for h in self._held.values())
        in_use = tuple((layer, tuple(h.leaving for h in visits)) for layer, visits in self._in_use.items() if visits)
        return held, tuple(sorted(in_use)), tuple(self._pending), len(self._free)

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

    def _reclaim(self, held: Held) -> None:
        if held.leaving and not held.users and held.ready:
            self._free.append(held.slot)

    def _start(self) -> list[Held]:
        started = []
        while self._pending and self._free:
            layer = self._pending.popleft()
            held = Held(layer, self._free.popleft())
            self._held[layer] = held
            started.append(held)
        self.stats.peak_layers = max(self.stats.peak_layers, self._slots - len(self._free))
        return started

    def _note_loads(self, layers: Sequence[int]) -> None:
        self.stats.loads += len(layers)
        if self._keep_log:
            self.stats.log += [("load", layer) for layer in layers]

    def _tell(self, line: str) -> None:
        if self._say:
            self._say(line)
