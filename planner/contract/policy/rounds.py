"""Passes that are all alike: which unit lies in which slot, and what is copied when it is left. Known before the first pass begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property


class Rounds:
    """Units pass in a cycle through slots of several classes, each unit through the same slot in every pass.

    ``classes`` give each unit's slot class in the order of a pass. Those of one class take its slots in turn, from the first slot on in
    each pass. So a pass begins with the first units of each class in their slots, and ends with the same ones there for the next.
    """

    def __init__(self, classes: Sequence[str], slots: Mapping[str, int]):
        self._classes = tuple(classes)
        self._members = {name: [i for i, c in enumerate(classes) if c == name] for name in dict.fromkeys(classes)}
        self._rank = [self._members[name].index(i) for i, name in enumerate(classes)]
        self._slots = {name: min(slots[name], len(members)) for name, members in self._members.items()}

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The units that lie in slots when a pass begins, in forward order."""
        return tuple(i for i, rank in enumerate(self._rank) if rank < self._slots[self._classes[i]])

    def place(self, unit: int) -> tuple[str, int]:
        """(class, slot index) of the ``unit``-th of a pass."""
        name = self._classes[unit]
        return name, self._rank[unit] % self._slots[name]

    def behind(self, unit: int) -> int:
        """What is copied into the slot of ``unit`` when that is left: a later unit of the pass, or one of :attr:`first` for the next."""
        name = self._classes[unit]
        members, rank, slots = self._members[name], self._rank[unit], self._slots[name]
        return members[rank + slots] if rank + slots < len(members) else members[rank % slots]
