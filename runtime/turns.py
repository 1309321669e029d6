"""The ring's decisions without threads, bytes or clocks: which unit is copied next, into which slot, and what must come before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Turns:
    """Units pass in a cycle; the n-th unit since the start has number n. The whole state is five counters.

    ``classes`` give each unit's slot class in the order of a pass. The numbers of a class take that class's slots in turn, so
    the slot of a number, and the number that had it before, follow from arithmetic.
    """

    def __init__(self, classes: Sequence[str], slots: Mapping[str, int], distance: int, wrap: bool):
        if classes and distance < 1:
            raise ValueError(f"distance={distance}: the copier must run at least 1 unit ahead")
        self._classes = tuple(classes)
        self._members = {name: [i for i, c in enumerate(classes) if c == name] for name in dict.fromkeys(classes)}
        self._rank = [self._members[name].index(i) for i, name in enumerate(classes)]
        self._slots = slots
        self._distance = distance
        self._wrap = wrap
        self.begun = 0
        """Passes that compute has begun."""
        self.fetched = 0
        """Units that were asked of DRAM: the next number to fetch."""
        self.copied = 0
        """Units whose copy was queued."""
        self.entered = 0
        self.left = 0

    def place(self, number: int) -> tuple[str, int]:
        """(class, slot index) of ``number``."""
        name = self._classes[number % len(self._classes)]
        return name, self._ordinal(number) % self._slots[name]

    def before(self, number: int) -> int | None:
        """The number that had ``number``'s slot last."""
        name = self._classes[number % len(self._classes)]
        ordinal = self._ordinal(number) - self._slots[name]
        if ordinal < 0:
            return None
        members = self._members[name]
        return ordinal // len(members) * len(self._classes) + members[ordinal % len(members)]

    def may_fetch(self) -> bool:
        """The next unit lies within the window, and its pass has begun unless the window wraps."""
        if not self._wrap and self.fetched // len(self._classes) >= self.begun:
            return False
        return self.fetched < self.entered + self._distance

    def may_copy(self) -> bool:
        """Compute has issued everything that reads the unit whose slot the fetched one takes."""
        before = self.before(self.fetched - 1)
        return before is None or before < self.left

    def may_enter(self) -> bool:
        """The next unit's copy was queued, so its kernels may be issued behind it."""
        return self.entered < self.copied

    def _ordinal(self, number: int) -> int:
        """How many of its class came before ``number``."""
        passes, i = divmod(number, len(self._classes))
        return passes * len(self._members[self._classes[i]]) + self._rank[i]
