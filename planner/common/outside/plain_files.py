"""Files that someone else made: regular ones alone, and no larger than they may be."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from penstock.planner.common.errors import UserError

POINTER = b"version "
"""How a file begins that stands for one which Git LFS fetches."""
SMALL_BYTES = 64 << 20
"""The most that a file of configuration may hold: plans, manifests, config.json, indices."""
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_plain(path: Path, device: bool = False) -> BinaryIO:
    """``path``, open for reading, once it is known to be a regular file; with ``device`` a block device will do, too.

    OSError whose ``strerror`` says what it is otherwise. Never waits: a pipe that nobody writes to is refused, not opened for ever.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, "a path cannot hold a null byte", str(path)) from error
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        what = next((words for test, words in _KINDS if test(mode)), None)
        if what is not None and not (device and stat.S_ISBLK(mode)):
            raise OSError(errno.EINVAL, f"{what}, not a file", str(path))
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_plain(path: Path, most_bytes: int = SMALL_BYTES) -> bytes:
    """The whole of a regular file. OSError as :func:`open_plain`, and for one of more than ``most_bytes``."""
    with open_plain(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes >> 20} MiB, too large to be such a file", str(path))
    return content


def check_fetched(path: Path, begin: bytes) -> None:
    """UserError where ``begin``, the first bytes of a file of weights, are those of a pointer: a clone without Git LFS has no more."""
    if begin.startswith(POINTER):
        raise UserError(f"{path}: a pointer of Git LFS, not the file itself; run `git lfs pull` there, or download the file")
