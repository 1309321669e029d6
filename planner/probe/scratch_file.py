"""What the SSD is read from: a scratch file that has no name, or files that are already there."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.cgroup import read_text
from penstock.planner.common.measures import ALIGN, align_down, show_bytes
from penstock.planner.probe.findings import CannotMeasure

LEAST_BYTES = 64 * 2**20
"""A scratch file or existing file smaller than this measures nothing."""
MEMORY = ("tmpfs", "ramfs")
"""File systems that are memory themselves: nothing is cached in front of them."""
FREE_SHARE = 4
"""A scratch file takes at most one part in this many of the free space."""


@dataclass(frozen=True)
class Target:
    """Open files to read blocks from: ``extents`` are (descriptor, bytes)."""

    extents: tuple[tuple[int, int], ...]
    direct: bool
    """O_DIRECT is on; without it, reads pass through the page cache, which is dropped before each measurement."""
    what: str
    memory: bool = False
    """The files lie in memory."""

    @property
    def repeats(self) -> bool:
        """Whether a second pass tells as much as the first: no cache has kept what was read."""
        return self.direct or self.memory

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.extents)

    @property
    def how(self) -> str:
        return "O_DIRECT" if self.direct else "buffered: no O_DIRECT on this file system"

    def drop_cache(self) -> None:
        """Ask the kernel to forget cached pages of the files."""
        for fd, _ in self.extents:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


class Cursor:
    """Hands out consecutive blocks of a target to many threads, starting at a random place and wrapping.

    One cursor serves a whole probe, so that each measurement reads what was read least recently.
    """

    def __init__(self, target: Target, seed: int | None = None) -> None:
        self._extents = target.extents
        self._lock = threading.Lock()
        self._extent = 0
        self._offset = align_down(random.Random(seed).randrange(target.extents[0][1]))

    def take(self, block_bytes: int) -> tuple[int, int]:
        """(descriptor, offset) of the next ``block_bytes`` bytes; raises CannotMeasure when no file is that large."""
        with self._lock:
            for _ in range(len(self._extents) + 1):
                fd, size = self._extents[self._extent]
                if self._offset + block_bytes <= size:
                    at, self._offset = self._offset, self._offset + block_bytes
                    return fd, at
                self._extent, self._offset = (self._extent + 1) % len(self._extents), 0
            raise CannotMeasure(f"no file holds a block of {show_bytes(block_bytes)}")


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user may still write on the file system of ``path``."""
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def file_system(path: Path | int, root: Path = Path("/")) -> str:
    """Type of the file system that holds ``path`` or an open file: ``ext4``, ``tmpfs``; ``unknown`` if the system does not say."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2:3] == [number] and right:
            return right.split()[0]
    return "unknown"


def set_direct(fd: int) -> bool:
    """Turn O_DIRECT on; False where the file system refuses."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _open_nameless(directory: Path) -> int:
    """A new file without a name: it is gone when the descriptor closes, however the process ends.

    Where the file system has no O_TMPFILE the file has a name for the instant between its making and its unlinking.
    """
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
    name = directory / f".penstock-probe-{os.getpid()}-{random.getrandbits(32):08x}"
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.unlink(name)
    return fd


def scratch_bytes(directory: Path, wanted: int) -> int:
    """Size of the scratch file: ``wanted`` or its share of the free space; raises CannotMeasure when that is too little."""
    free = free_bytes(directory)
    size = align_down(min(wanted, free // FREE_SHARE), 2**20)
    if size < LEAST_BYTES:
        raise CannotMeasure(f"no room in {directory}: {show_bytes(free)} free, a scratch file needs {show_bytes(FREE_SHARE * LEAST_BYTES)}")
    return size


@contextmanager
def scratch_file(directory: Path) -> Iterator[tuple[int, bool]]:
    """(descriptor, whether O_DIRECT is on) of a nameless empty file in ``directory``; raises CannotMeasure if refused."""
    try:
        fd = _open_nameless(directory)
    except OSError as error:
        raise CannotMeasure(f"no scratch file in {directory}: {error.strerror}") from error
    try:
        yield fd, set_direct(fd) and _direct_writes(fd)
    finally:
        os.close(fd)


def _direct_writes(fd: int) -> bool:
    """Whether a write goes through with O_DIRECT on; turns it off where the file system took the flag but not the write."""
    try:
        os.pwritev(fd, [mmap.mmap(-1, ALIGN)], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        return False
    return True


@contextmanager
def existing_files(directory: Path) -> Iterator[Target]:
    """The large files of ``directory`` that are fully written, opened for reading; raises CannotMeasure when there are none."""
    with ExitStack() as opened:
        extents, direct = [], True
        for path in sorted(p for p in directory.iterdir() if p.is_file()):
            stat = path.stat()
            if stat.st_size < LEAST_BYTES or stat.st_blocks * 512 < stat.st_size or not os.access(path, os.R_OK):
                continue
            fd = os.open(path, os.O_RDONLY)
            opened.callback(os.close, fd)
            direct = set_direct(fd) and direct
            extents.append((fd, align_down(stat.st_size)))
        if not extents:
            raise CannotMeasure(f"no file of {show_bytes(LEAST_BYTES)} to read in {directory} either")
        yield Target(tuple(extents), direct, f"{len(extents)} files that were there", file_system(directory) in MEMORY)
