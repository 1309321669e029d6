"""What comes in parts again and again, as readers in C take it: they are asked for all of it by one call, and say once that it has come."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

X = TypeVar("X")
Numbers = tuple[int, int]
"""Where structs lie, and how many."""

PART_WORDS = 7
"""Of ``struct part``."""
_LOOKED, _EVENT = 3, 6
"""Words of it."""
_LOOK_WORDS, _SEGMENT_WORDS = 5, 3
"""Of ``struct look``, ``struct segment``."""
_NUMBER, _INBOX, _CARRIER, _TO = 2, 3, 4, 5
"""Words of ``struct asked``."""


def part_words(runs: Numbers, looks: array[int] | None, segments: array[int] | None = None) -> tuple[int, ...]:
    """``struct part``: what is read, what of it is looked at, and what is copied on."""
    return (*runs, *_counted(looks, _LOOK_WORDS), *_counted(segments, _SEGMENT_WORDS), 0)


class Looks(NamedTuple):
    """At the parts of what comes again and again: each until its numbers were numbers once."""

    words: Sequence[array[int]]
    """Of each part ``struct look`` one after the other."""
    refusal: Callable[[memoryview], BaseException | None]
    """Why not, of a buffer to which it came; None where they are. Looks without C."""


class Order(Generic[X]):
    """All ``parts`` of one thing, each with its runs, with what is looked at of it, and with the segments that are copied on. Nobody asks
    for it while it is under way; what readers tell of it stays until it is asked for again. Some 600 bytes."""

    __slots__ = ("_asked", "_carrier", "_into", "_kept", "_looks", "_told", "_words", "address", "name", "nbytes", "parts")

    def __init__(
        self, name: str, parts: Sequence[X], runs: Sequence[Numbers], segments: Sequence[array[int]], looks: Looks | None, kept: object
    ):
        """``kept``: what holds the runs."""
        self.name, self.parts = name, parts
        looked = [None] * len(parts) if looks is None else looks.words
        each = zip(runs, looked, segments, strict=True)
        self._words = array("q", [word for run, look, copied in each for word in part_words(run, look, copied)])
        self._told = array("q", bytes(16 * len(parts)))
        self._asked = array("q", (self._words.buffer_info()[0], len(parts), 0, 0, 0, 0, self._told.buffer_info()[0]))
        self.address, _ = self._asked.buffer_info()
        """Of its ``struct asked``."""
        self.nbytes = [sum(copied[2::_SEGMENT_WORDS]) for copied in segments]
        """That are copied on, of each part."""
        self._looks, self._kept = looks, (kept, segments)
        self._carrier: object = None
        self._into: memoryview | None = None

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

    def carry(self, carrier: object, address: int, to: int, events: Sequence[int]) -> None:
        """When it comes next, ``carrier``, whose struct lies at ``address``, copies its segments on to memory at ``to``. The driver's
        ``events`` are recorded behind its parts."""
        self._carrier = carrier  # C looks at it
        self._words[_EVENT::PART_WORDS] = array("q", events)
        self._asked[_CARRIER], self._asked[_TO] = address, to
        for at in range(len(self._told)):
            self._told[at] = 0

    def come(self, number: int, inbox: int, into: memoryview) -> None:
        """It is asked for next as ``number``, into a buffer; the inbox whose struct lies at ``inbox`` hears of it."""
        self._asked[_NUMBER], self._asked[_INBOX], self._into = number, inbox, into

    @property
    def numbers(self) -> array[int]:
        """Of each part, the last time: how many the carrier had carried with it."""
        return self._told[::2]

    @property
    def begun_ns(self) -> array[int]:
        """Of each part, the last time: when its copies were queued, by the monotonic clock."""
        return self._told[1::2]

    def refusal(self) -> BaseException | None:
        """Why a part was not sound, or not carried, the last time; None where none was refused."""
        unsound = None if self._looks is None or self._into is None else self._looks.refusal(self._into)
        if unsound is not None:
            return unsound
        refused = min(self.numbers)
        return RuntimeError(f"CUDA error: to queue a copy of what was read returned {-refused}") if refused < 0 else None


def _counted(words: array[int] | None, each: int) -> Numbers:
    if not words:
        return 0, 0
    address, count = words.buffer_info()
    return address, count // each
