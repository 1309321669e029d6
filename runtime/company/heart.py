"""A rank's side of the watchdog: it says that it lives, and hears that all has ended."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable

from penstock.planner.common.outside.streams import tell

BEAT_S = 0.5
TOLD_S = 2.0
"""That the main thread has to leave by itself, once all has ended."""


class Heart:
    """Beats on a thread of its own until :meth:`leave`. ``address`` is the name of the watchdog's socket.

    When the watchdog says that all has ended, :attr:`lost` has its line, and whoever waits for another rank raises it. A process that is
    still there ``TOLD_S`` later (in a kernel that waits for a card that is gone, say) prints the line and ends with its status.
    """

    def __init__(self, address: str, rank: int):
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect("\0" + address)
        self._left = threading.Event()
        self._tell_lost: Callable[[str], None] | None = None
        self._told = threading.Event()
        self._is_alone = False
        """Whether the watchdog has no line of its own for why all has ended."""
        self.lost: str | None = None
        """Why all has ended."""
        self.status = 2
        self._say(f"rank {rank}")
        self._thread = threading.Thread(target=self._beat, name="penstock-heart", daemon=True)
        self._thread.start()

    def steady(self, yes: bool = True) -> None:
        """From now on silence means that this process hangs, or no longer does: imports may hold the interpreter for long."""
        self._say("steady" if yes else "easy")

    def failed(self, status: int, line: str) -> None:
        """This rank cannot go on, and so nobody can: rank 0 is to end with ``status`` and tell ``line``."""
        self._left.set()
        self._say(f"failed {status} {' '.join(line.split())}")

    def told_elsewhere(self) -> None:
        """Whoever started this process says how it ended: the watchdog ends the others without a line."""
        self._say("told")

    def when_lost(self, told: Callable[[str], None]) -> None:
        """``told`` hears the watchdog's line, too."""
        self._tell_lost = told

    def tell_lost(self) -> None:
        """This rank ends since all has ended. Why is told here where nobody else tells it."""
        if self._is_alone and not self._left.is_set():
            self._left.set()
            tell(f"runtime: {self.lost}")

    def end(self, status: int, line: str) -> None:
        """All ranks of this host end, this one by itself, as if the watchdog had said ``line``."""
        self._is_alone = True
        self._say("kill")
        self._say("bye")  # the watchdog has no line of its own for what follows
        self._end(f"end {status} {' '.join(line.split())}")

    def kill_others(self) -> None:
        """End every other rank on the spot."""
        self._say("kill")

    def why(self, seconds: float) -> str | None:
        """What the watchdog says, which may come a moment after another rank was lost."""
        self._told.wait(seconds)
        return self.lost

    def leave(self) -> None:
        """This process goes on without the others. Safe to call twice."""
        if not self._left.is_set():
            self._left.set()
            self._say("bye")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._sock.close()

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._sock.sendall(f"{line}\n".encode())

    def _beat(self) -> None:
        rest = b""
        while not self._left.is_set():
            try:
                readable, _, _ = select.select([self._sock], [], [], BEAT_S)
                data = self._sock.recv(4096) if readable else None
            except OSError:
                data = b""
            if data is None:
                self._say("beat")
                continue
            rest += data
            if not data or rest.endswith(b"\n"):
                self._end(rest.decode(errors="replace").strip())
                return

    def _end(self, line: str) -> None:
        _, _, rest = line.partition(" ")
        status, _, why = rest.partition(" ")
        self.lost = why or "the watchdog of the ranks has ended; all ranks have ended"
        self.status = int(status or 2)
        self._told.set()
        if self._tell_lost is not None:
            self._tell_lost(self.lost)
        if not self._left.wait(TOLD_S):
            self._say("bye")  # the line is told here
            tell(f"runtime: {self.lost}")
            os._exit(self.status)
