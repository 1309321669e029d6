"""A thread that waits under a lock, woken only when what it waits for has come true."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waiter:
    """One thread's place to wait under ``lock``, which all who call have taken.

    Whoever changes something looks for itself whether the waiting thread may go on: a thread that is woken in vain takes the interpreter
    from the one that issues kernels, twice, for what a look costs once.
    """

    def __init__(self, lock: threading.RLock):
        self._condition = threading.Condition(lock)
        self._ready: Callable[[], bool] | None = None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return once ``ready()``; what it raises is raised here."""
        self._ready = ready
        try:
            self._condition.wait_for(ready)
        finally:
            self._ready = None

    def tell(self) -> None:
        """Something has changed."""
        if self._ready is not None and self._may_go_on(self._ready):
            self._condition.notify()

    @staticmethod
    def _may_go_on(ready: Callable[[], bool]) -> bool:
        try:
            return ready()
        except Exception:  # the waiting thread meets it again
            return True
