"""The VRAM ring without bytes: the runtime's turns, carried out on a lane of the link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from penstock.planner.common.timeline.spans import COMPUTE, SSD
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.policy.turns import Turns
from penstock.planner.simulate.lanes.events import Record
from penstock.planner.simulate.lanes.lanes import Lanes, Work


class UnitSource(Protocol):
    """Where copies come from. ``ask`` and then, once ``arrived``, ``take``; ``give_back`` when the copy is over."""

    def arrived(self, unit: Unit) -> bool: ...
    def ask(self, unit: Unit) -> None: ...
    def take(self, unit: Unit) -> None: ...
    def give_back(self, unit: Unit) -> None: ...


class SimulatedRing:
    """Copies ``units`` pass after pass, one at a time, without gaps: the runtime keeps a few pieces of the next one queued. ``size`` gives
    the nanoseconds and bytes of a number's copy.

    Compute's host thread enters and leaves a unit when its copy is queued (:meth:`issue`). :meth:`free` says when a slot was really left.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        turns: Turns,
        size: Callable[[int], tuple[int, int]],
        source: UnitSource,
        lanes: Lanes,
        record: Record,
        track: str,
    ):
        self.units, self.turns = tuple(units), turns
        self._size, self._source, self._lanes, self._record, self._track = size, source, lanes, record, track
        self.computed = 0
        """Units whose slots compute has really left."""
        self._ahead: set[int] = set()
        """Copied, and not yet computed."""
        self._asked: int | None = None
        self._copying: int | None = None
        self._cleared: dict[int, tuple[int, int]] = {}
        """Of fetched units: when the window reached them, and when DRAM held them."""
        self._end = 0

    def begin_pass(self) -> None:
        self.turns.begun += 1

    def issue(self, until: int) -> None:
        """The host issues all kernels up to those of unit ``until``, as far as copies are queued."""
        turns = self.turns
        while turns.entered < until:
            turns.asked = turns.entered + 1
            if not turns.may_enter():
                return
            turns.entered += 1
            turns.left += 1

    def copied(self, number: int) -> bool:
        """Whether ``number`` has arrived."""
        return number in self._ahead

    def free(self, number: int) -> None:
        """Compute is through with ``number``, the next one in order."""
        self._ahead.discard(number)
        self.computed = number + 1

    def go_on(self) -> bool:
        """Do what the copier can do now; whether that was anything."""
        turns, did = self.turns, False
        while self._copying is None:
            if self._asked is not None:
                if not self._source.arrived(self._unit(self._asked)):
                    return did
                self._take(self._asked)
            number = turns.next_copy()
            if number is not None:
                if not self._free(number):
                    return did
                self._copy(number)
            elif turns.may_fetch_now(lambda n: self._source.arrived(self._unit(n))):
                self._fetch(turns.fetched)
            else:
                return did
            did = True
        return did

    def state(self) -> tuple[object, ...]:
        """Between passes."""
        start = self.turns.entered
        cleared = tuple(sorted((n - start, *when) for n, when in self._cleared.items()))
        asked = None if self._asked is None else self._asked - start
        copying = None if self._copying is None else self._copying - start
        return self.turns.state(), self.computed - start, tuple(sorted(n - start for n in self._ahead)), asked, copying, cleared

    def rebase(self, passed_ns: int) -> None:
        """The clock was set back."""
        self._cleared = {n: (window - passed_ns, dram - passed_ns) for n, (window, dram) in self._cleared.items()}

    def _unit(self, number: int) -> Unit:
        return self.units[number % len(self.units)]

    def _free(self, number: int) -> bool:
        before = self.turns.before(number)
        return before is None or before < self.computed

    def _fetch(self, number: int) -> None:
        unit = self._unit(number)
        self._cleared[number] = (self._lanes.now, self._lanes.now)
        there = self._source.arrived(unit)
        self._source.ask(unit)
        if there and self._source.arrived(unit):
            self._take(number)
        else:
            self._asked = number

    def _take(self, number: int) -> None:
        self._asked = None
        self._source.take(self._unit(number))
        self._cleared[number] = (self._cleared[number][0], self._lanes.now)
        self.turns.fetched += 1

    def _copy(self, number: int) -> None:
        unit, now = self._unit(number), self._lanes.now
        window, dram = self._cleared.pop(number)
        since = self._lanes.of[self._track].idle_since
        self._record.waited(self._track, COMPUTE, str(unit), since, min(window, now))
        self._record.waited(self._track, SSD, str(unit), max(since, window), min(dram, now))
        self._record.waited(self._track, COMPUTE, str(unit), max(since, dram), now)
        length_ns, nbytes = self._size(number)
        self._copying = number
        self._lanes.add(self._track, Work((unit.kind, unit.layer), str(unit), nbytes, partial(self._over, number)), length_ns)
        self.turns.copy(number)

    def _over(self, number: int) -> None:
        self._copying = None
        self._ahead.add(number)
        self._source.give_back(self._unit(number))
