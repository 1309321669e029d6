"""What the front says, heard on a thread of its own, which ends the process when nobody speaks any more."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from penstock.runtime.serve.wire.frames import BadFrame, Frames
from penstock.runtime.serve.wire.messages import heard

GRACE_S = 3.0
"""What is left of the 5 seconds in which a motor ends whose front has gone, once that was noticed."""


class Gone:
    """The front's socket is closed."""


class Inbox:
    """Messages in the order in which they came, then one :class:`Gone`. ``after_s`` later ``end`` is called, whatever the others do: also
    inside a pass."""

    def __init__(self, frames: Frames, after_s: float = GRACE_S, end: Callable[[], None] = lambda: os._exit(1)):
        self._frames, self._after_s, self._end = frames, after_s, end
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="penstock-inbox", daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Behind what was heard so far, from any thread."""
        self._heard.put(message)

    def next(self, wait_s: float | None) -> Any:
        """The next message; None where none came within ``wait_s`` (None: for ever)."""
        try:
            return self._heard.get(wait_s != 0, wait_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """The process ends by itself."""
        self._over.set()

    def _listen(self) -> None:
        try:
            while (data := self._frames.receive()) is not None:
                self._heard.put(heard(data))
        except (OSError, BadFrame, ValueError):
            pass  # as good as closed: what comes next is not understood
        self._heard.put(Gone())
        if not self._over.wait(self._after_s):
            self._end()
