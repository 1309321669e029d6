"""A small process beside the ranks of one host: it starts those that are to be started, hears them, and ends all when one is lost.

``python -m penstock.runtime.company.watchdog SOCKET [COMMAND ...]``: SOCKET is the descriptor of a listening socket of this host's ranks,
each COMMAND one to start, as JSON: its argv and what its environment has beside this one's. Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

TICK_S = 0.2
SILENT_S = 7.0
"""A steady rank that has said nothing for so long hangs."""
STOPPED_S = 2.0
"""A process that has been stopped for so long is lost, whatever it was doing."""
LEAVING_S = 3.0
"""That a rank may take to tell why all has ended, and to end."""
LINGER_S = 10.0
"""That a rank which has given all back may take to end."""
PEER = struct.Struct("3i")
PR_SET_PDEATHSIG = 1


def say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


@dataclass
class Watched:
    """One rank, from its first word on."""

    sock: socket.socket
    pid: int
    rank: int = -1
    heard: float = field(default_factory=time.monotonic)
    stopped: float | None = None
    """Since when it was seen to be stopped."""
    steady: bool = False
    left: bool = False
    """Whether it has said that it goes."""
    told: bool = False
    """Whether whoever started it says how it ended."""
    rest: bytes = b""

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    def tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(f"{line}\n".encode())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)


class Watchdog:
    """``with`` signals ignored, it watches until no rank is left."""

    def __init__(self, listening: socket.socket, commands: list[str]):
        self._listening = listening
        self._ranks: dict[socket.socket, Watched] = {}
        self._met = False
        self._leaving: dict[int, float] = {}
        """Rank that has said that it goes -> when its process is killed, if it is still there."""
        self._ending: float | None = None
        """When whoever is left is killed."""
        self._untold: tuple[int, str] | None = None
        """The rank that was to say why all end, and what it was to say."""
        self._looked = time.monotonic()
        self._statuses: dict[int, int] = {}
        """Of processes that were seen to have ended, by rank: some before their socket was seen to be closed."""
        self._children = {int(json.loads(c)["env"]["RANK"]): self._start(json.loads(c)) for c in commands}

    def run(self) -> None:
        """Until all that were watched are gone."""
        while not self._met or self._ranks or self._children:
            readable, _, _ = select.select([self._listening, *self._ranks], [], [], TICK_S)
            now = time.monotonic()
            if now - self._looked > STOPPED_S:  # this process was stopped itself, as by Ctrl-Z: what others missed does not count
                for each in self._ranks.values():
                    each.heard, each.stopped = now, None
            self._looked = now
            for sock in readable:
                self._accept() if sock is self._listening else self._hear(self._ranks[sock])
            self._look(now)
            self._reap()
            if self._ending is not None and now >= self._ending:
                for each in self._ranks.values():
                    each.kill()

    def _start(self, command: dict[str, object]) -> subprocess.Popen[bytes]:
        """Its end comes with this process's, however that ends; signals of the terminal are not for it."""
        libc = ctypes.CDLL(None)

        def follow() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)

        argv, more = command["argv"], command["env"]
        assert isinstance(argv, list) and isinstance(more, dict)
        env = os.environ | more
        return subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, preexec_fn=follow)

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        pid, uid, _ = PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
        if uid != os.getuid():
            sock.close()
            return
        sock.settimeout(1.0)
        self._ranks[sock] = Watched(sock, pid)
        self._met = True

    def _hear(self, one: Watched) -> None:
        try:
            data = one.sock.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._gone(one)
            return
        one.heard = time.monotonic()
        *lines, one.rest = (one.rest + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode(errors="replace").partition(" ")
            if word == "rank":
                one.rank = int(rest)
            elif word in ("steady", "easy"):
                one.steady = word == "steady"
            elif word == "bye":
                one.left = True
            elif word == "told":
                one.told = True
            elif word == "kill":
                self._kill_others(one)
            elif word == "failed":
                status, _, why = rest.partition(" ")
                one.left = True
                self._end(int(status), f"rank {one.rank}: {why}", one)

    def _gone(self, one: Watched) -> None:
        del self._ranks[one.sock]
        one.sock.close()
        if one.left:
            late = time.monotonic() + LINGER_S
            self._leaving |= dict.fromkeys(self._children if one.rank == 0 else [one.rank], late)
        elif self._untold is not None and self._untold[0] == one.rank:
            say(f"runtime: {self._untold[1]}")  # it has ended itself before it could
        elif one.told:
            self._ending = self._ending or time.monotonic() + LEAVING_S
            self._kill_others(None)
        else:
            self._end(2, f"{one.name} {self._how(one.rank)}; all ranks have ended", one)

    def _how(self, rank: int) -> str:
        """In which way a rank has ended, once its socket is closed."""
        child = self._children.get(rank)
        if child is None:
            return _ended(self._statuses[rank]) if rank in self._statuses else "has ended unexpectedly"
        try:
            return _ended(child.wait(LEAVING_S))
        except subprocess.TimeoutExpired:
            child.kill()
            return "has closed its socket"

    def _look(self, now: float) -> None:
        """Who is stopped, and who is silent."""
        for one in list(self._ranks.values()):
            one.stopped = (one.stopped or now) if _is_stopped(one.pid) else None
            stopped = one.stopped is not None and now - one.stopped > STOPPED_S
            if self._ending is None and not one.left and (stopped or (one.steady and now - one.heard > SILENT_S)):
                why = "was stopped" if stopped else f"has not answered for {SILENT_S:g} s"
                one.kill()
                one.left = True
                self._end(2, f"{one.name} {why}; all ranks have ended", one)

    def _reap(self) -> None:
        for rank, child in list(self._children.items()):
            status = child.poll()
            if status is None:
                if time.monotonic() > self._leaving.get(rank, math.inf):
                    child.kill()
                continue
            del self._children[rank]
            self._statuses[rank] = status
            if status and rank not in self._leaving and self._ending is None and not any(one.rank == rank for one in self._ranks.values()):
                self._end(2, f"rank {rank} (process {child.pid}) {_ended(status)}; all ranks have ended", None)

    def _end(self, status: int, line: str, lost: Watched | None) -> None:
        """All end: the first of those that are left tells ``line``, the others are killed at once. One that was started here would tell
        nobody, so the line is told here."""
        if self._ending is not None:
            return
        self._ending = time.monotonic() + LEAVING_S
        left = (one for one in self._ranks.values() if one is not lost and one.rank not in self._children)
        teller = min(left, key=lambda one: one.rank, default=None)
        if teller is None:
            say(f"runtime: {line}")
        else:
            self._untold = teller.rank, line
            teller.tell(f"end {status} {line}")
        self._kill_others(teller)

    def _kill_others(self, but: Watched | None) -> None:
        for one in self._ranks.values():
            if one is not but:
                one.left = True
                one.kill()
        for rank, child in self._children.items():
            if but is None or rank != but.rank:
                child.kill()


def _ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"has ended with status {status}"


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][:1] == "T"
    except OSError:
        return False


def main() -> None:
    """Entry point."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        Watchdog(listening, sys.argv[2:]).run()


if __name__ == "__main__":
    main()
