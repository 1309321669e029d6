"""What comes in parts again and again, as readers in C take it: they are asked for all of it by one call, and say once that it has come."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

X = TypeVar("X")
K = TypeVar("K")
Numbers = tuple[int, int]
"""Where structs lie, and how many."""

PART_WORDS = 6
"""Of ``struct part``."""
_LOOKED = 3
"""A word of it."""
_LOOK_WORDS, _SEGMENT_WORDS = 5, 3
"""Of ``struct look``, ``struct segment``."""
_NUMBER, _INBOX, _CARRIER, _TO, _EVENTS, _INTO = 2, 3, 4, 5, 7, 8
"""Words of ``struct asked``."""


class Carrier(Protocol):
    """Whose struct lies at ``address``."""

    address: int


def part_words(runs: Numbers, looks: array[int] | None, segments: array[int] | None = None) -> tuple[int, ...]:
    """``struct part``: what is read, what of it is looked at, and what is copied on."""
    return (*runs, *_counted(looks, _LOOK_WORDS), *_counted(segments, _SEGMENT_WORDS))


class Looks(NamedTuple):
    """At the parts of what comes again and again: each until its numbers were numbers once."""

    words: Sequence[array[int]]
    """Of each part ``struct look`` one after the other."""
    refusal: Callable[[memoryview], BaseException | None]
    """Why not, of a buffer to which it came; None where they are. Looks without C."""


class Order(Generic[X]):
    """All ``parts`` of one thing, each with its runs, with what is looked at of it, and with the segments that are copied on. Nobody asks
    for it while it is under way; what readers tell of it stays until it is asked for again. Some 900 bytes."""

    __slots__ = ("_asked", "_carrier", "_into", "_kept", "_looks", "_words", "address", "asked", "name", "nbytes", "parts", "told")

    def __init__(
        self, name: str, parts: Sequence[X], runs: Sequence[Numbers], segments: Sequence[array[int]], looks: Looks | None, kept: object
    ):
        """``kept``: what holds the runs."""
        self.name, self.parts = name, parts
        looked = [None] * len(parts) if looks is None else looks.words
        each = zip(runs, looked, segments, strict=True)
        self._words = array("q", [word for run, look, copied in each for word in part_words(run, look, copied)])
        self.told = array("q", bytes(16 * len(parts)))
        """Of each part, the last time: its number among what the carrier had carried with it; when its copies were queued, in ns of the
        monotonic clock."""
        self._asked = array("q", (self._words.buffer_info()[0], len(parts), 0, 0, 0, 0, self.told.buffer_info()[0], 0, 0))
        self.address, _ = self._asked.buffer_info()
        """Of its ``struct asked``."""
        self.nbytes = [sum(copied[2::_SEGMENT_WORDS]) for copied in segments]
        """That are copied on, of each part."""
        self._looks, self._kept = looks, (kept, segments)
        self._carrier: object = None
        self._into: memoryview | None = None
        self.asked: Any = None
        """What readers know of it while it is under way."""

    @property
    def looked(self) -> array[int]:
        """Of each part: at how many numbers readers look when it comes next."""
        return self._words[_LOOKED::PART_WORDS]

    @looked.setter
    def looked(self, counts: array[int]) -> None:
        self._words[_LOOKED::PART_WORDS] = counts

    def looked_at(self, part: int) -> None:
        """Somebody else has looked at this part."""
        self._words[part * PART_WORDS + _LOOKED] = 0

    def carry(self, carrier: Carrier, to: int, events: array[int]) -> None:
        """When it comes next, ``carrier`` copies its segments on to memory at ``to``. The driver's ``events`` are recorded behind its
        parts."""
        self._carrier, words = (carrier, events), self._asked  # C looks at both
        words[_CARRIER], words[_TO], words[_EVENTS] = carrier.address, to, events.buffer_info()[0]

    def come(self, number: int, inbox: int, into: memoryview, address: int) -> None:
        """It is asked for next as ``number``, into a buffer that lies at ``address``; the inbox whose struct lies at ``inbox`` hears of
        it."""
        words, self._into = self._asked, into
        words[_NUMBER], words[_INBOX], words[_INTO] = number, inbox, address

    @property
    def numbers(self) -> array[int]:
        """Of each part, the last time: how many the carrier had carried with it."""
        return self.told[::2]

    @property
    def begun_ns(self) -> array[int]:
        """Of each part, the last time: when its copies were queued, by the monotonic clock."""
        return self.told[1::2]

    def refusal(self) -> BaseException | None:
        """Why a part was not sound, or not carried, the last time; None where none was refused."""
        unsound = None if self._looks is None or self._into is None else self._looks.refusal(self._into)
        if unsound is not None:
            return unsound
        refused = min(self.numbers)
        return RuntimeError(f"CUDA error: to queue a copy of what was read returned {-refused}") if refused < 0 else None


Brought = tuple[Order[Any], K, memoryview, int]
"""What comes next, as whom its inbox hears of it, the buffer to which it comes, and where that lies."""

Come = Callable[[float], int | None]
"""Called with a time of the host's clock, in seconds, sleeps for orders that were asked for together, a second at most. When all have come,
kernels that are issued next wait for what their carrier carried: returns for which of their parts, one order's behind the other's. None,
and nothing is known, where the inbox has to be looked at instead, or the last copy was queued before that time. What came stays there."""


def _counted(words: array[int] | None, each: int) -> Numbers:
    if not words:
        return 0, 0
    address, count = words.buffer_info()
    return address, count // each
