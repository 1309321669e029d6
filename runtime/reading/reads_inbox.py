"""Where a consumer hears which of its reads are over, as many at a time as there are."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

K = TypeVar("K")
Heard = tuple[K, BaseException | None]
"""What was read, and why it could not be."""


class Inbox(Protocol[K]):
    """Of one consumer; anybody may put something into it."""

    def put(self, key: K, error: BaseException | None = None) -> None:
        """``key`` is over."""

    def take(self, most_s: float, least: int = 1) -> list[Heard[K]]:
        """What came, in order; waits for ``least`` of it for so many seconds at most. May come back early with less, as for a signal."""


class Refusing(Protocol):
    """What a read has to be, besides read."""

    def refusal(self) -> BaseException | None:
        """Why what came is not to be used; None where it is. Looks without C."""


class Look(NamedTuple):
    """What is looked at when a read has brought it: whether numbers in its buffer are numbers."""

    words: array[int]
    """``struct look`` of look.h, one after the other."""
    why: Callable[[], BaseException | None]

    def refusal(self) -> BaseException | None:
        """See :class:`Refusing`."""
        return self.why()


class Ticket(Generic[K]):
    """The ``done`` of a read that comes into ``inbox`` as ``key`` when it is over: readers that know inboxes do that without Python. So
    they ``look`` at what came; where that is no number, Python says so."""

    __slots__ = ("inbox", "key", "look")

    def __init__(self, inbox: Inbox[K], key: K, look: Refusing | None = None):
        self.inbox, self.key, self.look = inbox, key, look

    def __call__(self, error: BaseException | None) -> None:
        if error is None and self.look is not None:
            error = self.look.refusal()
        self.inbox.put(self.key, error)


class PlainInbox(Generic[K]):
    """In Python alone."""

    def __init__(self) -> None:
        self._heard: deque[Heard[K]] = deque()
        self._came = threading.Condition()

    def put(self, key: K, error: BaseException | None = None) -> None:
        with self._came:
            self._heard.append((key, error))
            self._came.notify()

    def take(self, most_s: float, least: int = 1) -> list[Heard[K]]:
        with self._came:
            if not self._heard and most_s:
                self._came.wait(most_s)
            heard = [*self._heard]
            self._heard.clear()
            return heard
