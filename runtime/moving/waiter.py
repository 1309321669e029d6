"""A thread that waits under a lock, woken only when what it waits for has come true."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waiter:
    """One thread's place to wait under ``lock``, which every caller holds.

    Whoever changes something checks whether the waiting thread may go on, and wakes it only then. A thread woken in vain takes the
    interpreter twice from the thread that launches kernels; a check costs it once.
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
