"""A waiting thread is woken when what it waits for has come true, and not before."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.runtime.moving.waiter import Waiter


class Waiting:
    """A thread that waits for ``ready``, and who looked, in order."""

    def __init__(self, ready: Callable[[], bool]):
        self.lock = threading.RLock()
        self.waiter = Waiter(self.lock)
        self.looked: list[str] = []
        self.error: Exception | None = None
        self._ready = ready
        self._waits = threading.Event()
        self.thread = threading.Thread(target=self._run, name="waiting")
        self.thread.start()
        assert self._waits.wait(10)

    def tell(self) -> None:
        with self.lock:  # which the waiting thread holds until it waits
            self.waiter.tell()

    def _run(self) -> None:
        try:
            with self.lock:
                self._waits.set()
                self.waiter.wait(self._look)
        except Exception as error:
            self.error = error

    def _look(self) -> bool:
        self.looked.append(threading.current_thread().name)
        return self._ready()


def test_it_sleeps_until_whoever_tells_it_finds_that_it_may_go_on() -> None:
    there: list[bool] = []
    waiting = Waiting(lambda: bool(there))
    for _ in range(20):
        waiting.tell()
    assert waiting.looked.count("waiting") == 1 and waiting.thread.is_alive()
    there.append(True)
    waiting.tell()
    waiting.thread.join(10)
    assert waiting.looked[-2:] == ["MainThread", "waiting"] and waiting.looked.count("waiting") == 2
    waiting.tell()
    assert len(waiting.looked) == 23


def test_what_looking_raises_is_raised_where_it_is_waited() -> None:
    broken: list[bool] = []

    def ready() -> bool:
        if broken:
            raise ValueError("broken")
        return False

    waiting = Waiting(ready)
    broken.append(True)
    waiting.tell()
    waiting.thread.join(10)
    assert isinstance(waiting.error, ValueError)
