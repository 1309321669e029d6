"""Points in the copy stream that somebody else will record, made while nothing waits for them."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from typing import NamedTuple

from penstock.runtime.memory.device import CopyDevice, Event


class Points(NamedTuple):
    """Each of ``events`` with the driver's handle of it."""

    events: list[Event]
    handles: array[int]


class PointsAhead:
    """Of ``device``, by how many are taken at once. There are as many to be taken as were between two calls of :meth:`fill`."""

    def __init__(self, device: CopyDevice):
        self._device = device
        self._made: defaultdict[int, deque[Points]] = defaultdict(deque)
        self._taken: defaultdict[int, int] = defaultdict(int)
        self._most: defaultdict[int, int] = defaultdict(int)

    def take(self, count: int) -> Points:
        """``count`` points that nobody has."""
        self._taken[count] += 1
        made = self._made[count]
        return made.popleft() if made else self._make(count)

    def fill(self) -> None:
        """Nothing waits: make what :meth:`take` will give."""
        for count, taken in self._taken.items():
            most = self._most[count] = max(self._most[count], taken)
            made = self._made[count]
            made.extend([self._make(count) for _ in range(most - len(made))])
        self._taken.clear()

    def _make(self, count: int) -> Points:
        points = [self._device.event_ahead() for _ in range(count)]
        return Points([event for event, _ in points], array("q", [handle for _, handle in points]))
