"""The ring's decisions without threads, bytes or clocks: which unit is copied next, into which slot, and what must come before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence


class Turns:
    """Units pass in a cycle; the n-th unit since the start has number n. The whole state is a few counters.

    ``classes`` give each unit's slot class in the order of a pass. Numbers of one class are copied in order and take the slots of the class
    in turn. So arithmetic gives a number's slot, and the number that had it before. A slot is free once its unit and ``keep`` units after
    it were left.

    ``balance`` counts from the first unit that is not yet copied: of so many units, one with a free slot may be copied before its turn. 1
    is forward order. With ``distance`` 0 a unit is fetched when compute asks for it. Units of the indices ``late`` are not fetched before
    their pass has begun.
    """

    def __init__(
        self,
        classes: Sequence[str],
        slots: Mapping[str, int],
        distance: int,
        wrap: bool = True,
        balance: int = 1,
        keep: int = 0,
        late: Collection[int] = (),
    ):
        self._classes = tuple(classes)
        self._members = {name: [i for i, c in enumerate(classes) if c == name] for name in dict.fromkeys(classes)}
        self._rank = [self._members[name].index(i) for i, name in enumerate(classes)]
        self._slots = slots
        self._distance = distance
        self._wrap = wrap
        self._balance = balance
        self._keep = keep
        self._late = frozenset(late)
        self._copied = dict.fromkeys(self._members, 0)
        self.begun = 0
        """Passes that compute has begun."""
        self.asked = 0
        """Units that compute has asked for, whether they were there or not."""
        self.fetched = 0
        """Units that were asked of DRAM: the next number to fetch."""
        self.entered = 0
        self.left = 0

    @property
    def copied(self) -> int:
        """Units whose copy was queued."""
        return sum(self._copied.values())

    @property
    def first(self) -> int:
        """The first number that is not yet copied."""
        return min(self._number(name, count) for name, count in self._copied.items())

    @property
    def shortest_round(self) -> int:
        """Units, at least, from one that takes a slot to the next one that does; ``keep`` must be less, or nothing moves in the end."""
        starts = ((name, k) for name, members in self._members.items() for k in range(len(members)))
        return min(self._number(name, k + self._slots[name]) - self._number(name, k) for name, k in starts)

    def place(self, number: int) -> tuple[str, int]:
        """(class, slot index) of ``number``."""
        name, ordinal = self._seat(number)
        return name, ordinal % self._slots[name]

    def before(self, number: int) -> int | None:
        """The number that had ``number``'s slot last."""
        name, ordinal = self._seat(number)
        ordinal -= self._slots[name]
        return None if ordinal < 0 else self._number(name, ordinal)

    def may_fetch(self) -> bool:
        """The next unit lies within the window and among those to choose from, and its pass has begun unless the window wraps and it is not
        late."""
        if self._late or not self._wrap:
            passes, index = divmod(self.fetched, len(self._classes))
            if passes >= self.begun and (not self._wrap or index in self._late):
                return False
        return self.fetched < max(self.entered + self._distance, self.asked) and self.fetched < self.first + self._balance

    def may_fetch_now(self, there: Callable[[int], bool]) -> bool:
        """Fetching holds up what was fetched before it, so that must be none, or the unit must be ``there`` already."""
        return self.may_fetch() and (self.fetched <= self.first or there(self.fetched))

    def next_copy(self) -> int | None:
        """The first fetched number whose slot is free: compute has issued everything that reads what lies there."""
        found = None
        for name, count in self._copied.items():
            number = self._number(name, count)
            if number < self.fetched and (found is None or number < found) and self._is_free(name, count - self._slots[name]):
                found = number
        return found

    def copy(self, number: int) -> None:
        """The copy of ``number``, which was :meth:`next_copy`, is queued."""
        self._copied[self._seat(number)[0]] += 1

    def find(self, there: Callable[[int], bool]) -> list[int]:
        """Between passes: numbers of the next one that are ``there`` already, though nobody copied them here; they count as copied. Of each
        class those behind what was copied, as far as its slots reach. They are asked of DRAM in their turn all the same."""
        found: list[int] = []
        for name, members in self._members.items():
            end = self.entered // len(self._classes) * len(members) + min(self._slots[name], len(members))
            while self._copied[name] < end and there(number := self._number(name, self._copied[name])):
                self._copied[name] += 1
                found.append(number)
        return found

    def is_copied(self, number: int) -> bool:
        """Whether its copy was queued, or it was found."""
        name, ordinal = self._seat(number)
        return ordinal < self._copied[name]

    def may_enter(self) -> bool:
        """The next unit's copy was queued, so its kernels may be issued behind it."""
        return self.is_copied(self.entered)

    def state(self) -> tuple[int, ...]:
        """Between passes, all that what comes next depends on: equal when only the number of passes differs."""
        units, passes = len(self._classes), self.entered // len(self._classes) if self._classes else 0
        ahead = (self.fetched - passes * units, self.left - passes * units, self.asked - passes * units, self.begun - passes)
        return *ahead, *(count - passes * len(self._members[name]) for name, count in self._copied.items())

    def _is_free(self, name: str, ordinal: int) -> bool:
        """Whether compute has left the unit of class ``name`` that has so many of its class before it; less than 0 stands for none."""
        return ordinal < 0 or self._number(name, ordinal) + self._keep < self.left

    def _seat(self, number: int) -> tuple[str, int]:
        """The class of ``number``, and how many of that came before it."""
        passes, i = divmod(number, len(self._classes))
        name = self._classes[i]
        return name, passes * len(self._members[name]) + self._rank[i]

    def _number(self, name: str, ordinal: int) -> int:
        """The number of class ``name`` that has so many of its class before it."""
        members = self._members[name]
        return ordinal // len(members) * len(self._classes) + members[ordinal % len(members)]
