"""Words that are kept at what a card waits for, when nobody else will write them any more."""

from __future__ import annotations

import threading
from collections.abc import Callable

_AGAIN_S = 1e-4
"""From one time to the next one: a card that another rank's last word overtakes waits again."""


class KeptWords:
    """Has ``write`` called again and again from :meth:`start` on, by a thread of its own, until :meth:`close`. Both may be called twice."""

    def __init__(self, write: Callable[[], None]):
        self._write = write
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-words", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Nothing is written any more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_AGAIN_S):
            self._write()
