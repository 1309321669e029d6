"""A file that nobody else sees and that is gone with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes

_REFUSED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


class Scratch:
    """``nbytes`` of SSD in ``directory``, taken at once. UserError where they are not to be had. Read and written past the page cache where
    the file system allows it: offsets, sizes and buffers are multiples of 4096."""

    def __init__(self, directory: Path, nbytes: int):
        try:
            self._fd = _open(directory)
            with contextlib.suppress(OSError):
                os.fchmod(self._fd, 0o600)
            os.posix_fallocate(self._fd, 0, nbytes)
        except OSError as error:
            self.close()
            why = error.strerror or str(error)
            raise UserError(f"kv.scratch_dir={directory}: {show_bytes(nbytes)} of KV cannot lie there ({why}); name another one") from error
        self._direct = False
        with contextlib.suppress(OSError):
            again = os.open(self.path, os.O_RDWR | os.O_DIRECT)
            os.close(self._fd)
            self._fd, self._direct = again, True

    @property
    def path(self) -> Path:
        """By which this process opens it."""
        return Path(f"/proc/self/fd/{self._fd}")

    def write(self, data: memoryview, offset: int) -> None:
        """OSError."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)

    def close(self) -> None:
        """Give the room back. Safe to call twice."""
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)


def _open(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in _REFUSED or not directory.is_dir():
            raise
    fd, name = tempfile.mkstemp(prefix=".penstock-kv-", dir=directory)
    os.unlink(name)
    return fd
