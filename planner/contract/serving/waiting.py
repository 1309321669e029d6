"""Requests, and the line in which they wait."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """``number`` names it. Its prompt has ``prompt_tokens``, its reply ``new_tokens`` at most."""

    number: int
    prompt_tokens: int
    new_tokens: int
    after: int | None = None
    """Starts only when the prompt of that request has been computed, whose pages it then shares."""

    @property
    def end_tokens(self) -> int:
        """Tokens whose KV it has at its end, at most: the last one is never computed with."""
        return self.prompt_tokens + self.new_tokens - 1


@dataclass(eq=False, slots=True)
class ServeRow:
    """A request and how far it is. ``order`` is its place in the order of arrival."""

    request: ServeRequest
    order: int
    given: int = 0
    """Tokens of its reply."""
    computed: int = 0
    """Tokens whose KV is in pages."""
    held: int = 0
    """Pages that it has."""

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def tokens(self) -> int:
        """Of the prompt and its reply so far."""
        return self.request.prompt_tokens + self.given

    @property
    def left(self) -> int:
        """Tokens that are to be computed."""
        return self.tokens - self.computed

    @property
    def decodes(self) -> bool:
        """Nothing but its newest token is left."""
        return self.given > 0 and self.left == 1

    def restart(self) -> None:
        """Its pages are gone."""
        self.computed = self.held = 0


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclass
class Waiting:
    """The line: those that were given up first, the older before the younger, then those that never lived, as they came."""

    _again: list[ServeRow] = field(default_factory=list)
    _new: dict[int, ServeRow] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._again) + len(self._new)

    def __iter__(self) -> Iterator[ServeRow]:
        """From the head on. The line may not change meanwhile."""
        return chain(self._again, self._new.values())

    def __contains__(self, number: int) -> bool:
        return number in self._new or any(row.number == number for row in self._again)

    @property
    def new(self) -> int:
        """Requests that never lived."""
        return len(self._new)

    def join(self, row: ServeRow) -> None:
        """At the end."""
        self._new[row.number] = row

    def come_back(self, row: ServeRow) -> None:
        """It was given up."""
        insort(self._again, row, key=lambda other: other.order)

    def leave(self, number: int) -> ServeRow | None:
        """Take it out; None where it does not wait."""
        if number in self._new:
            return self._new.pop(number)
        at = next((i for i, row in enumerate(self._again) if row.number == number), None)
        return None if at is None else self._again.pop(at)
