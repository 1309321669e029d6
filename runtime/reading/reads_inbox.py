"""Where a consumer hears which of its reads are over, as many at a time as there are."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, Protocol, TypeVar

K = TypeVar("K")
Heard = tuple[K, BaseException | None]
"""What was read, and why it could not be."""


class Inbox(Protocol[K]):
    """Of one consumer; anybody may put something into it."""

    def put(self, key: K, error: BaseException | None = None) -> None:
        """``key`` is over."""

    def take(self, most_s: float) -> list[Heard[K]]:
        """What came, in order; waits for it for so many seconds at most. May come back early with nothing, as for a signal."""


class Ticket(Generic[K]):
    """The ``done`` of a read that comes into ``inbox`` as ``key`` when it is over: readers that know inboxes do that without Python."""

    __slots__ = ("inbox", "key")

    def __init__(self, inbox: Inbox[K], key: K):
        self.inbox, self.key = inbox, key

    def __call__(self, error: BaseException | None) -> None:
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

    def take(self, most_s: float) -> list[Heard[K]]:
        with self._came:
            if not self._heard and most_s:
                self._came.wait(most_s)
            heard = [*self._heard]
            self._heard.clear()
            return heard
