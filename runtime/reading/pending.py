"""A call that several pieces of work answer together."""

from __future__ import annotations

import threading
from collections.abc import Callable

Done = Callable[[BaseException | None], None]


class Pending:
    """``done`` is called once, when the last of ``pieces`` is finished: with None, or with the first error."""

    __slots__ = ("_done", "_lock", "_open", "error")

    def __init__(self, pieces: int, done: Done):
        self.error: BaseException | None = None
        self._open = pieces
        self._done = done
        self._lock = threading.Lock()

    def finish(self, error: BaseException | None) -> None:
        """One piece is over."""
        with self._lock:
            self._open -= 1
            self.error = self.error or error
            last = not self._open
        if last:
            self._done(self.error)
