"""Points in a card's streams, each an event of the driver that is used again once nobody can ask about it any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

DriverEvent = Any
"""A ``torch.cuda.Event``, or what a test puts in its place."""


class CardEvent:
    """The point after everything that its stream was given before. Once it is known to have happened the driver is not asked again: a call
    into it costs 15 to 20 us on some hosts."""

    __slots__ = ("_at_s", "_driver", "_free", "happened")

    def __init__(self, driver: DriverEvent, free: deque[DriverEvent]):
        self._driver, self._free = driver, free
        self.happened = False
        """Whether that is known, by whomever."""
        self._at_s: float | None = None

    def __del__(self) -> None:
        self._free.append(self._driver)

    def before(self, stream: Any) -> None:
        """What ``stream`` is given from now on begins after it."""
        if not self.happened:
            self._driver.wait(stream)

    def wait(self) -> None:
        """Block the calling thread until it has happened."""
        if not self.happened:
            self._driver.synchronize()
            self.happened = True

    def done(self) -> bool:
        """Whether it has happened; never blocks."""
        if not self.happened:
            self.happened = self._driver.query()
        return self.happened

    def seconds_after(self, begin: CardEvent) -> float:
        """From ``begin``, the same one whenever it is asked; both have happened."""
        if self._at_s is None:
            self._at_s = begin._driver.elapsed_time(self._driver) / 1e3
            self.happened = True
        return self._at_s

    def seconds_until(self, driver: DriverEvent) -> float:
        """To an event that is recorded again and again."""
        return float(self._driver.elapsed_time(driver)) / 1e3


class HostPoint:
    """A point at which a stream had nothing to do, by the host's clock: the driver is not asked for an event. ``at_s``: seconds behind the
    event from which the others are counted."""

    __slots__ = ("_at_s",)

    def __init__(self, at_s: float):
        self._at_s = at_s

    def before(self, stream: Any) -> None:
        """It has happened."""

    def wait(self) -> None:
        """It has happened."""

    def done(self) -> bool:
        return True

    def seconds_after(self, begin: CardEvent) -> float:
        """From the event that ``at_s`` is counted from."""
        return self._at_s


class CardEvents:
    """Makes the points of one card, from any thread. There are as many of the driver's events as points are held at once."""

    def __init__(self, make: Callable[[], DriverEvent] = lambda: torch.cuda.Event(enable_timing=True, blocking=True)):
        self._make = make
        self._free: deque[DriverEvent] = deque()

    def record(self, stream: Any) -> CardEvent:
        """The point in ``stream`` after everything queued so far. Streams that wait for an earlier point of the same driver's event go on
        waiting for that one."""
        driver = self._taken()
        driver.record(stream)
        return CardEvent(driver, self._free)

    def ahead(self, stream: Any) -> tuple[CardEvent, int]:
        """A point of ``stream`` that somebody else will record, and the driver's handle for it. Nothing may be asked of it before."""
        driver = self._taken()
        return CardEvent(driver, self._free), driver.handle(stream)

    def _taken(self) -> DriverEvent:
        try:
            return self._free.pop()
        except IndexError:
            return self._make()
