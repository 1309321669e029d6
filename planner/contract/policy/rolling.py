"""WSM's rolling window (docs/origins.md): every layer passes through, finished ones leave when the high-water mark is reached."""

from __future__ import annotations

from collections import OrderedDict

from penstock.planner.contract.policy.base import Evict, Load, Step
from penstock.planner.contract.policy.cycle import Cycle


class RollingPolicy:
    """Fetches ``distance`` layers ahead. At ``hwm`` layers it shrinks to ``cap``: layers outside the window first, oldest first.

    A layer inside the window is evicted only if the window cannot fit (``distance`` > ``hwm``). The plan's rules forbid that. WSM logs it
    as "Evict (in window, LRU)"; its cost is a second read of the same layer.
    """

    def __init__(self, layers: tuple[int, ...], cap: int, hwm: int, distance: int, wrap: bool = True):
        self.hwm = hwm
        self._cap = cap
        self._distance = distance
        self._cycle = Cycle(layers, wrap)
        self._held: OrderedDict[int, None] = OrderedDict()

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(self._held)

    def preload(self) -> tuple[int, ...]:
        first = self._cycle.layers[: min(self._distance + 1, self.hwm)]
        self._held = OrderedDict.fromkeys(first)
        return first

    def access(self, layer: int) -> Step:
        hit = layer in self._held
        window = layer, *self._cycle.after(layer, self._distance)
        actions: list[Load | Evict] = []
        shrink = False
        if hit:
            self._held.move_to_end(layer)
        for candidate in window:
            if candidate in self._held:
                continue
            if len(self._held) >= self.hwm:
                shrink = True
                actions += self._shrink(layer, set(window))
                if len(self._held) >= self.hwm:
                    break
            self._held[candidate] = None
            actions.append(Load(candidate, prefetch=candidate != layer))
        return Step(hit, tuple(actions), shrink)

    def _shrink(self, current: int, window: set[int]) -> list[Evict]:
        out = [held for held in self._held if held not in window]
        victims = [Evict(held, in_window=False) for held in out[: len(self._held) - self._cap]]
        if not victims and (self._distance > self.hwm or current not in self._held):
            oldest = next(held for held in self._held if held != current)
            victims = [Evict(oldest, in_window=True)]
        for victim in victims:
            del self._held[victim.layer]
        return victims
