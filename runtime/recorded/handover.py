"""What a launch leaves for the next one: passes of several shapes are recorded over the same units in the same slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.device import Event


class Copied(NamedTuple):
    """A unit that was copied into its slot."""

    unit: Unit
    nbytes: int
    begin: Event
    end: Event


@dataclass
class Handover:
    """Shared by all recordings that go on from each other."""

    copies: list[Copied] = field(default_factory=list)
    """That are not booked yet, in the order in which they come."""
    there: dict[int, Event] = field(default_factory=dict)
    """Of units that a pass begins with, by number: behind the last copy that a launch made of each."""
    ended: bool = False
    """Whether the last launch copied nothing for a next one."""
    since_s: float = 0.0
    """When the first launch began since others had the slots."""
    _over: int = 0
    """So many of ``copies`` are over when the last launch is."""

    def begin_launch(self, ends: bool) -> None:
        """It waits for all that was copied before."""
        self.ended, self._over = ends, len(self.copies)

    def brought(self, copied: Copied) -> None:
        """The launch waits for this one, and so for those before it."""
        self.copies.append(copied)
        self._over = len(self.copies)

    def take_over(self) -> list[Copied]:
        """The last launch is over -> the copies that are over with it."""
        over, self.copies, self._over = self.copies[: self._over], self.copies[self._over :], 0
        return over
