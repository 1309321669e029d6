"""One block from the SSD to its place, whatever the file system and the disk do."""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.planner.common.measures import ALIGN
from penstock.runtime.reading.blocks import Block
from penstock.runtime.reading.files import FileTable, OpenFile
from penstock.runtime.reading.landing import address_of, after, targets
from penstock.runtime.reading.read_meter import Meter
from penstock.runtime.reading.stalls import Stalls
from penstock.runtime.reading.store_errors import StoreError

BACK_OFF_S = (0.01, 0.1, 0.5)
"""Seconds to wait before each retry of a failed read; after the last one the read has failed."""
RETRIED = (errno.EIO, errno.EAGAIN, errno.ETIMEDOUT)
"""Errors that may pass: everything else fails at once."""

Preadv = Callable[[int, Sequence[memoryview], int], int]
OnBlock = Callable[[str, str, int, float, float, int], None]
"""Called for every block: the reading thread's name, what the block is a part of, the number of the call of ``read``, when it began and
ended, and its bytes."""


class Target(NamedTuple):
    """What the block is a part of: call ``number`` of ``read``, called ``name``, into the buffer ``into`` at ``address``."""

    into: memoryview
    address: int
    name: str
    number: int


class Staging(NamedTuple):
    """A reading thread's own."""

    view: memoryview
    address: int

    @classmethod
    def of(cls, view: memoryview) -> Staging:
        return cls(view, address_of(view))


class BlockReader:
    """Reads blocks of ``files`` by ``preadv`` and books them. Safe to call from many threads."""

    def __init__(self, files: FileTable, preadv: Preadv, usual: Stalls, on_block: OnBlock | None):
        self.meter, self.stalls, self.on_block = Meter(), usual, on_block
        self.preadv = preadv
        self._files = files

    def tried(self, block: Block, target: Target, staging: Staging) -> Exception | None:
        """Read ``block``. Why it could not be read; None when it lies in its place."""
        try:
            self._read(block, target, staging)
        except Exception as caught:  # handed to whoever waits for this read
            return caught
        return None

    def _read(self, block: Block, target: Target, staging: Staging) -> None:
        file = self._files.get(block.file)
        fd, direct = file.fd()
        if direct and self._read_direct(fd, file, block, target, staging):
            return
        fd, _ = file.fd()
        view = target.into[block.dest : block.dest + block.nbytes]
        self._fill(fd, file.path, [view], block.offset, block.nbytes, 1, target)
        file.done_with(block.offset, block.nbytes)

    def _read_direct(self, fd: int, file: OpenFile, block: Block, target: Target, staging: Staging) -> bool:
        """Read ``block`` with O_DIRECT. False: the file system refuses."""
        lead = block.offset - block.start
        views, copies = targets(block, target.into, staging.view)
        try:
            self._fill(fd, file.path, views, block.start, lead + block.nbytes, ALIGN, target)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            file.refuse_direct()
            return False
        for source, dest, nbytes in copies:
            ctypes.memmove(target.address + dest, staging.address + source, nbytes)
        return True

    def _fill(self, fd: int, path: Path, views: list[memoryview], offset: int, needed: int, align: int, target: Target) -> None:
        """Read until ``needed`` bytes from ``offset`` are in ``views``; what may pass is tried again."""
        got = failures = total = 0
        begun = self.meter.begin()
        try:
            while got < needed:
                problem = "the file ends there"
                try:
                    n = self.preadv(fd, after(views, got) if got else views, offset + got)
                except OSError as error:
                    if error.errno not in RETRIED:
                        if error.errno == errno.EINVAL and align > 1:  # O_DIRECT is refused; :meth:`_read_direct` falls back
                            raise
                        raise StoreError(f"{path}: read at offset {offset + got} failed ({error.strerror}); check the disk") from error
                    n, problem = 0, error.strerror or str(error)
                total += n
                step = n if got + n >= needed else n - n % align  # O_DIRECT goes on at an aligned offset alone
                got += step
                if step:
                    failures = 0
                    continue
                if failures == len(BACK_OFF_S):
                    raise StoreError(
                        f"{path}: read of {needed - got} bytes at offset {offset + got} failed {failures + 1} times ({problem}); "
                        f"check the disk, or download or pack the weights again"
                    )
                self.meter.retry()
                time.sleep(BACK_OFF_S[failures])
                failures += 1
        finally:
            ended = self.meter.end(total)
            self.stalls.note(ended - begun, path, offset)
            if self.on_block is not None:
                self.on_block(threading.current_thread().name, target.name, target.number, begun, ended, total)
