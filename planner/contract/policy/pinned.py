"""Keep some layers still and stream the others through the headroom below the high-water mark."""

from __future__ import annotations

from penstock.planner.contract.policy.base import Evict, Load, Step
from penstock.planner.contract.policy.cycle import Cycle


class PinnedPolicy:
    """``resident`` layers never leave; the others pass through ``hwm - len(resident)`` slots.

    A cycle of N layers with C slots misses every time under any recency rule; with C layers pinned, N - C miss.
    A streamed layer is evicted in favour of one that is wanted sooner, so nothing that lies ahead is read twice.
    """

    def __init__(self, layers: tuple[int, ...], resident: frozenset[int], hwm: int, distance: int, wrap: bool = True):
        self.hwm = hwm
        self.resident = resident
        self._cycle = Cycle(layers, wrap)
        self._distance = distance
        self._slots = hwm - len(resident)
        self._held: list[int] = []

    @property
    def held(self) -> tuple[int, ...]:
        return (*sorted(self.resident), *self._held)

    def preload(self) -> tuple[int, ...]:
        layers = self._cycle.layers
        streamed = [layer for layer in layers[: self._distance + 1] if layer not in self.resident]
        self._held = streamed[: self._slots]
        return tuple(layer for layer in layers if layer in self.resident or layer in self._held)

    def access(self, layer: int) -> Step:
        hit = layer in self.resident or layer in self._held
        actions: list[Load | Evict] = []
        wanted = [] if hit else [layer]
        wanted += [x for x in self._cycle.after(layer, self._distance) if x not in self.resident]
        for candidate in wanted:
            if candidate in self._held:
                continue
            if len(self._held) >= self._slots:
                victim = max(self._held, key=lambda held: self._until(layer, held))
                if self._until(layer, victim) <= self._until(layer, candidate):
                    break
                self._held.remove(victim)
                in_window = 0 < self._cycle.ahead(layer, victim) <= self._distance
                actions.append(Evict(victim, in_window and self._distance < len(self._cycle) - 1))
            self._held.append(candidate)
            actions.append(Load(candidate, prefetch=candidate != layer))
        return Step(hit, tuple(actions))

    def _until(self, current: int, layer: int) -> int:
        """Visits until ``layer`` is wanted again; a layer behind the current one waits nearly a whole cycle."""
        return self._cycle.ahead(current, layer)
