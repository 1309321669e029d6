"""`runtime serve` whose motors are forked from a process that has their imports: a round of kills costs one second of a core, not eight.

    python bench/warm_motors.py serve plan=plan.yaml port=0 kv.dir=DIR

Each motor is a process of its own, which loads, serves and dies as any other. The process with the imports is the front's child, the motor
its grandchild.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LOOK_S = 0.02
"""Seconds between two looks whether a motor has ended."""


class ForkedMotor:
    """As the front sees it; see ``MotorProcess``."""

    def __init__(self, sock: socket.socket, pid: int, asked: WarmMotors):
        self.sock, self.pid, self._asked = sock, pid, asked

    async def ended(self) -> int:
        while self.pid not in self._asked.ended():
            await asyncio.sleep(LOOK_S)
        return self._asked.ended()[self.pid]

    def kill(self) -> None:
        if self.pid not in self._asked.ended():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class WarmMotors:
    """The front's end: starts the process with the imports, and motors by it."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
        self._ended: dict[int, int] = {}
        self._begun: list[int] = []

    async def start(self) -> ForkedMotor:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._sock, [b"start"], [theirs.fileno()])
        while not self._begun:
            self._look()
            await asyncio.sleep(LOOK_S)
        return ForkedMotor(ours, self._begun.pop(), self)

    def ended(self) -> dict[int, int]:
        """Motor -> its exit status."""
        self._look()
        return self._ended

    def _look(self) -> None:
        while select.select([self._sock], [], [], 0)[0]:
            words = self._sock.recv(64).split()
            if not words:
                raise OSError("the process with the imports has ended")
            if words[0] == b"begun":
                self._begun.append(int(words[1]))
            else:
                self._ended[int(words[1])] = int(words[2])


def fork_motors(sock: socket.socket) -> None:
    """A motor for each socket that comes over ``sock``, until the front has gone."""
    from penstock.planner.common.threads import wait_asleep

    wait_asleep()
    from penstock.runtime.serve.motor import motor, served  # noqa: F401  # all that a motor imports

    while True:
        if select.select([sock], [], [], LOOK_S)[0]:
            said, found, _, _ = socket.recv_fds(sock, 64, 1)
            if not said:
                return
            pid = os.fork()
            if not pid:
                sock.close()
                os.setsid()
                os.dup2(2, 1)
                sys.argv = ["motor", str(found[0])]
                os._exit(motor.main())
            os.close(found[0])
            sock.send(b"begun %d" % pid)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                sock.send(b"ended %d %d" % (ended[0], os.waitstatus_to_exitcode(ended[1])))


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].isdecimal():
        with socket.socket(fileno=int(sys.argv[1])) as sock:
            fork_motors(sock)
        return
    warm = WarmMotors()
    from penstock.runtime import cli
    from penstock.runtime.serve import serve_process

    serve_process.start_motor = warm.start  # type: ignore[assignment]
    sys.argv[0] = "runtime"
    cli.main()


if __name__ == "__main__":
    main()
