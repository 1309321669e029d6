"""Points in the copy stream that somebody else will record, made while nothing waits for them."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from typing import NamedTuple

from penstock.runtime.memory.device import CopyDevice, Event

AHEAD = 2
"""How often the same can be taken: a visit copies once what lies in DRAM, and most that read from the SSD read one or two experts."""


class Points(NamedTuple):
    """Each of ``events`` with the driver's handle of it."""

    events: list[Event]
    handles: array[int]


class PointsAhead:
    """Of ``device``, by how many are taken at once."""

    def __init__(self, device: CopyDevice):
        self._device = device
        self._made: defaultdict[int, deque[Points]] = defaultdict(deque)

    def take(self, count: int) -> Points:
        """``count`` points that nobody has."""
        made = self._made[count]
        return made.popleft() if made else self._make(count)

    def fill(self) -> None:
        """Nothing waits: make for next time what was taken before."""
        for count, made in self._made.items():
            while len(made) < AHEAD:
                made.append(self._make(count))

    def _make(self, count: int) -> Points:
        made = [self._device.event_ahead() for _ in range(count)]
        return Points([event for event, _ in made], array("q", [handle for _, handle in made]))
