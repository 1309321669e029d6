"""Segment files: equal slots of one page each, written once, front to back.

All pages of a segment have one shape, so the record of slot ``s`` begins at ``s * record_bytes``. A file is created under its final name. A
record is valid by its header, so segments need no publishing of their own. A slot is written in two steps: zeros in place of the header
together with the payload, then the header alone. What a crash can leave:

* kill -9: a slot without a header, at the end of the last segment. It is no page; the next writer overwrites it.
* power loss: the drive may have kept a header and lost payload. The checksum shows that when the page is read, and the page is absent.
  Waiting for the drive between the two steps would be slower and no safer. The drive is waited for before an index is published.

Files are opened for each read and write (about 10 microseconds). So no descriptor outlives an evicted segment, and its space is free at
once, also when another process still reads the directory.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.planner.common.measures import ALIGN, align_down
from penstock.runtime.kv.disk.page_record import Header, PageShape, decode, is_of_other_format

_NAME = re.compile(r"segment-([0-9a-f]{8})\.kv")
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)
_SCAN_BYTES = 1 << 20

Transfer = Callable[[int, Sequence[memoryview], int], int]
"""``os.preadv`` or ``os.pwritev``, or a test's own."""


class SegmentFiles:
    """The segments of a directory. ``direct`` turns False once the file system has refused O_DIRECT. Reads and writes then go through the
    page cache, which is asked to forget them. Thread-safe. Buffers must be 4096-aligned."""

    def __init__(self, directory: Path, preadv: Transfer = os.preadv, pwritev: Transfer = os.pwritev):
        self.directory = directory
        self._prefix = f"{directory}{os.sep}segment-"
        self._local = threading.local()
        self.direct = hasattr(os, "O_DIRECT")
        self._preadv = preadv
        self._pwritev = pwritev

    def path(self, number: int) -> str:
        return f"{self._prefix}{number:08x}.kv"

    def header_page(self) -> memoryview:
        """4096 aligned bytes of the calling thread's own, overwritten at its next call."""
        if not hasattr(self._local, "page"):
            self._local.page = aligned(ALIGN)
        return self._local.page

    def found(self) -> dict[int, os.stat_result]:
        """Segment files that are there, by number."""
        files = {}
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if match := _NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        files[int(match[1], 16)] = entry.stat()
        return files

    def read(self, number: int, views: Sequence[memoryview], offset: int) -> int:
        """Fill ``views`` and return the bytes read, fewer where the file ends. OSError, FileNotFoundError for an evicted segment."""

        def fill(fd: int) -> int:
            n = _transfer(self._preadv, fd, views, offset)
            self._forget(fd, offset, n)
            return n

        return self._on(number, os.O_RDONLY, fill)

    def create(self, number: int) -> None:
        """A new, empty segment. FileExistsError when its name is taken."""
        os.close(os.open(self.path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))

    def write(self, number: int, views: Sequence[memoryview], offset: int) -> None:
        """Write all of ``views``. OSError: any part of them may have been written."""
        nbytes = sum(map(len, views))

        def put(fd: int) -> int:
            if _transfer(self._pwritev, fd, views, offset) < nbytes:
                raise OSError(errno.EIO, "the drive took part of a page")
            if not self.direct:
                os.fdatasync(fd)
            self._forget(fd, offset, nbytes)
            return nbytes

        self._on(number, os.O_WRONLY, put)

    def cut(self, number: int, nbytes: int) -> None:
        """Truncate a segment after its last whole record."""
        os.truncate(self.path(number), nbytes)

    def sync(self, number: int) -> None:
        """Wait until what was written to the segment is on the drive."""
        fd = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(number))

    def touch(self, number: int, used_ns: int) -> None:
        """Note the time of the last use as the file's, where this process may: other processes and later runs see it there."""
        with contextlib.suppress(OSError):
            os.utime(self.path(number), ns=(used_ns, used_ns))

    def scan(self, number: int, nbytes: int, shape: PageShape | None = None, start: int = 0) -> Iterator[Header]:
        """Headers of the whole records in a segment of ``nbytes``, from slot ``start`` on; damaged ones are left out. Without ``shape``
        the first sound header tells it. Reads 4096 bytes a page, and payload only in search of a first sound header. OSError."""
        page = self.header_page()
        if shape is None:
            first = self._first_header(number, nbytes)
            if first is None:
                return
            shape = first.shape
        for slot in range(start, nbytes // shape.record_bytes):
            got = self.read(number, [page], slot * shape.record_bytes)
            header = decode(page, number) if got == ALIGN else None
            if header is not None and header.shape == shape and header.slot == slot:
                yield header

    def _first_header(self, number: int, nbytes: int) -> Header | None:
        buffer = aligned(_SCAN_BYTES)
        step = ALIGN  # one page is enough unless the first header is damaged
        at = 0
        while at < nbytes:
            got = self.read(number, [buffer[:step]], at)
            if not at and got == ALIGN and is_of_other_format(buffer[:ALIGN]):
                return None
            for k in range(0, align_down(got), ALIGN):
                header = decode(buffer[k : k + ALIGN], number)
                if header is not None and at + k == header.slot * header.shape.record_bytes:
                    return header
            at, step = at + step, _SCAN_BYTES
        return None

    def _on(self, number: int, flags: int, act: Callable[[int], int]) -> int:
        """``act`` on the opened segment; once more, without O_DIRECT, when the file system refuses that."""
        direct = self.direct
        try:
            return self._opened(number, flags | os.O_DIRECT if direct else flags, act)
        except OSError as error:
            if not direct or error.errno not in _REFUSALS:
                raise
        self.direct = False
        return self._opened(number, flags, act)

    def _opened(self, number: int, flags: int, act: Callable[[int], int]) -> int:
        fd = os.open(self.path(number), flags | os.O_CLOEXEC)
        try:
            return act(fd)
        finally:
            os.close(fd)

    def _forget(self, fd: int, offset: int, nbytes: int) -> None:
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def aligned(nbytes: int) -> memoryview:
    """Page-aligned zeros."""
    return memoryview(mmap.mmap(-1, nbytes))


def _transfer(call: Transfer, fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Repeat ``call`` until all of ``views`` went through or nothing more does; the bytes that did."""
    total, done = sum(map(len, views)), 0
    while done < total:
        n = call(fd, _after(views, done), offset + done)
        step = n if done + n == total else align_down(n)
        if not step:
            return done + n
        done += step
    return done


def _after(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """``views`` without their first ``nbytes`` bytes."""
    rest = []
    for view in views:
        if nbytes < len(view):
            rest.append(view[nbytes:])
        nbytes = max(0, nbytes - len(view))
    return rest
