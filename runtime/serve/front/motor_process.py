"""The motor as a process of its own, connected by one socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

import penstock


class StartedMotor:
    """A process that was started; see :class:`MotorProcess`."""

    def __init__(self, sock: socket.socket, process: asyncio.subprocess.Process):
        self.sock, self._process = sock, process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


async def start_motor() -> StartedMotor:
    """Start one. Signals of the terminal go to the front alone; what the motor prints goes to standard error."""
    ours, theirs = socket.socketpair()
    try:
        here = str(Path(penstock.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-m", "penstock.runtime.serve.motor.motor", str(theirs.fileno())]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return StartedMotor(ours, process)
