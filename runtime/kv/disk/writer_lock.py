"""One writer a directory."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
from pathlib import Path

from penstock.planner.common.errors import UserError

LOCK = "writer.lock"


class Locked(UserError):
    """Another process writes to the directory."""


class WriterLock:
    """``flock`` on a file that names the holder. The kernel releases it when the holder dies in any way. On NFS (Linux) it is a lock on the
    server, so it holds between hosts. A process forked from the holder shares it until both are gone.

    Locked if another process holds it: its name, the usual remedies, and ``otherwise``. UserError also if no lock can be had here.
    """

    def __init__(self, directory: Path, otherwise: str):
        path = directory / LOCK
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(f"{directory}: cannot be written ({error.strerror}); name a directory that this user may write to") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._holder()
            os.close(self._fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise Locked(f"{directory}: {holder} writes there; wait for its end, stop it, {otherwise}") from None
            raise UserError(f"{directory}: cannot be locked ({error.strerror}); name a directory on another disk") from error
        with contextlib.suppress(OSError):  # a full disk: the lock is held all the same, by one who is not named
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}).encode(), 0)

    def release(self) -> None:
        """A second call does nothing."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def _holder(self) -> str:
        try:
            told = json.loads(os.pread(self._fd, 4096, 0))
            return f"process {told['pid']} of host {told['host']} (since {told['since']})"
        except (OSError, ValueError, KeyError, TypeError):  # it has only just taken the lock
            return "another process"


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
