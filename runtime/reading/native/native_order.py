"""What comes in parts again and again, as readers in C take it: they are asked for all of it by one call, and say once that it has come."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Generic, TypeVar

X = TypeVar("X")
Numbers = tuple[int, int]
"""Where structs lie, and how many."""

PART_WORDS = 7
"""Of ``struct part``."""
_LOOKS, _SEGMENTS, _EVENT = 2, 4, 6
"""Words of it."""
_LOOK_WORDS, _SEGMENT_WORDS = 5, 3
"""Of ``struct look``, ``struct segment``."""


def part_words(runs: Numbers, looks: array[int] | None, segments: array[int] | None = None) -> tuple[int, ...]:
    """``struct part``: what is read, what of it is looked at, and what is copied on."""
    return (*runs, *_counted(looks, _LOOK_WORDS), *_counted(segments, _SEGMENT_WORDS), 0)


class Order(Generic[X]):
    """All ``parts`` of one thing, each with its runs and with the segments that are copied on of it. Nobody asks for it while it is under
    way."""

    __slots__ = ("_kept", "_looks", "address", "nbytes", "parts", "words")

    def __init__(self, parts: Sequence[X], runs: Sequence[Numbers], segments: Sequence[array[int]], kept: object):
        """``kept``: what holds the runs."""
        self.parts = parts
        self.words = array("q", [w for run, copied in zip(runs, segments, strict=True) for w in part_words(run, None, copied)])
        self.address, _ = self.words.buffer_info()
        self.nbytes = [sum(copied[2::_SEGMENT_WORDS]) for copied in segments]
        """That are copied on, of each part."""
        self._looks: Sequence[array[int]] = ()
        self._kept = kept, segments

    def look(self, looks: Sequence[array[int]]) -> None:
        """At what comes next: of each part ``struct look`` one after the other, or nothing at all."""
        if looks or self._looks:
            self._looks = looks
            for i in range(len(self.parts)):
                at = i * PART_WORDS + _LOOKS
                self.words[at : at + 2] = array("q", _counted(looks[i] if looks else None, _LOOK_WORDS))

    def record(self, events: Sequence[int]) -> None:
        """The driver's events that are recorded behind the parts' copies when it comes next."""
        self.words[_EVENT::PART_WORDS] = array("q", events)


def _counted(words: array[int] | None, each: int) -> Numbers:
    if not words:
        return 0, 0
    address, count = words.buffer_info()
    return address, count // each
