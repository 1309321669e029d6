"""The CPU's lane beside a card: units of a decode step in their order, and what its threads read ahead of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from penstock.planner.common.timeline.spans import CPU
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.simulate.lanes.lanes import Lanes, Work
from penstock.planner.simulate.lanes.wait import Wait


@dataclass(frozen=True)
class OnHost:
    """A unit that the CPU computes. In nanoseconds, while nothing else is in flight."""

    length_ns: int
    """Its way there and back with it."""
    hop_ns: int
    """Of that, the way."""
    ahead_ns: int
    """Of that, bytes that threads may have read before the unit is asked for."""


class HostLane:
    """``units`` in the order in which a step asks for them."""

    def __init__(self, units: Mapping[Unit, OnHost], lanes: Lanes):
        self._units, self._lanes = units, lanes
        self._next: Iterator[Unit] = iter(())
        self._ahead: Unit | None = None
        self._asked: set[Unit] = set()

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    def begin_step(self) -> None:
        """Threads spin for the first unit."""
        self._next = iter(self._units)
        self._look_ahead()

    def ask(self, unit: Unit, nbytes: int) -> Wait:
        """Have ``unit`` of so many bytes computed behind what was asked for before -> until it is."""
        self._asked.add(unit)
        done = Work((unit.kind, unit.layer), str(unit), nbytes, self._ended(unit))
        self._lanes.add(CPU, done, self._units[unit].length_ns - self._read_ns(unit))
        return self.answer(unit)

    def answer(self, unit: Unit) -> Wait:
        """Until ``unit``, which was asked for, is computed."""
        return Wait(lambda: unit not in self._asked, str(unit))

    def _ended(self, unit: Unit) -> Callable[[], None]:
        def end() -> None:
            self._asked.discard(unit)
            if not self._asked:
                self._look_ahead()

        return end

    def _look_ahead(self) -> None:
        """Threads read ahead of the next unit, until it is asked for."""
        self._ahead = next(self._next, None)
        if self._ahead is not None and (ahead_ns := self._units[self._ahead].ahead_ns):
            self._lanes.add(CPU, Work(("ahead", str(self._ahead)), f"ahead of {self._ahead}", 0, lambda: None), ahead_ns)

    def _read_ns(self, unit: Unit) -> int:
        """Of ``unit``, which is asked for, what was read before and what is while it is on its way."""
        one = self._units[unit]
        if self._ahead != unit or not one.ahead_ns:
            return 0
        left_ns = self._lanes.cut(CPU)
        return one.ahead_ns - max(0, left_ns - one.hop_ns)
