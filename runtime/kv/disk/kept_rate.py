"""How fast the drive under a directory is, before anyone waits for it."""

from __future__ import annotations

import errno
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import GB
from penstock.runtime.kv.disk.segments import SegmentFiles, aligned

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class DriveRate:
    """Of one thread with one block of 4 MiB in flight; a page read by several threads comes faster."""

    write_gbps: float
    read_gbps: float
    direct: bool
    """False where the file system refuses O_DIRECT: the page cache may then have helped."""


def measure(directory: Path, nbytes: int = 64 << 20) -> DriveRate:
    """Write, then read ``nbytes`` (rounded up to 4 MiB) in a file of its own, which has no name left afterwards. UserError.

    Takes 0.1 s on a drive of 1 GB/s. DRAM: 4 MiB.
    """
    path = directory / f"rate-{os.getpid()}.partial"
    block = aligned(_BLOCK_BYTES)
    block[:] = os.urandom(_BLOCK_BYTES)
    offsets = range(0, nbytes, _BLOCK_BYTES)
    try:
        try:
            return _measure(path, block, offsets, os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return _measure(path, block, offsets, 0)
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror}); name another directory") from error


def measure_reading(directory: Path, nbytes: int = 64 << 20) -> float:
    """GB/s at which one thread reads blocks of 4 MiB of the pages that lie in the directory, ``nbytes`` at most; infinite where none do.
    Writes nothing. UserError. Where the file system refuses O_DIRECT the page cache may help."""
    files, block = SegmentFiles(directory), aligned(_BLOCK_BYTES)
    read, begun = 0, time.perf_counter()
    try:
        for number in sorted(files.found(), reverse=True):
            offset, got = 0, len(block)
            while got == len(block) and read < nbytes:
                got = _read_if_there(files, number, block, offset)
                offset, read = offset + got, read + got
    except OSError as error:
        raise UserError(f"{directory}: cannot be read ({error.strerror}); name another directory") from error
    return read / GB / (time.perf_counter() - begun) if read else math.inf


def _read_if_there(files: SegmentFiles, number: int, block: memoryview, offset: int) -> int:
    try:
        return files.read(number, [block], offset)
    except FileNotFoundError:  # its writer removed it
        return 0


def _measure(path: Path, block: memoryview, offsets: range, direct: int) -> DriveRate:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.close(fd)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | direct)
    finally:
        path.unlink()
    try:
        begun = time.perf_counter()
        for offset in offsets:
            if os.pwrite(fd, block, offset) < len(block):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(fd)
        written = time.perf_counter()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in offsets:
            os.preadv(fd, [block], offset)
        read = time.perf_counter()
    finally:
        os.close(fd)
    amount = len(offsets) * len(block) / GB
    return DriveRate(amount / (written - begun), amount / (read - written), bool(direct))
