"""Reads from the SSD: a queue of blocks, and the threads that keep that many reads in flight."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN, align_down
from penstock.runtime.reading.blocks import Block, check_fits, cut
from penstock.runtime.reading.files import FileTable, OpenFile
from penstock.runtime.reading.landing import address_of, after, targets
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.pending import Done, Pending
from penstock.runtime.reading.read_meter import Meter
from penstock.runtime.reading.stalls import Stalls
from penstock.runtime.reading.store_errors import StoreError

BACK_OFF_S = (0.01, 0.1, 0.5)
"""Seconds to wait before each retry of a failed read; after the last one the read has failed."""
BEGUN_S = 0.002
"""How long :meth:`ReadPool.begun` waits at most: on a busy host readers may come to run late."""
RETRIED = (errno.EIO, errno.EAGAIN, errno.ETIMEDOUT)
"""Errors that may pass: everything else fails at once."""

Preadv = Callable[[int, Sequence[memoryview], int], int]
OnBlock = Callable[[str, int, float, float, int], None]
"""Called for every block: what it is a part of, the number of the call of ``read``, when it began and ended, and its bytes."""


class Reads(Protocol):
    """What brings extents to memory."""

    def read(self, extents: Sequence[Extent], into: memoryview, done: Done, name: str = "load") -> None:
        """Queue the reads of ``extents``, called ``name``, into the writable buffer ``into`` and return.

        ``done`` is called once, on a reading thread, when no read of this call is in flight any more. Its argument is None, or the first
        error; the rest of the call is then skipped. It must return quickly and not raise. Nothing may touch ``into`` before.
        """


class UrgentReads(Reads, Protocol):
    """The same, where some reads may come before others."""

    def read(self, extents: Sequence[Extent], into: memoryview, done: Done, name: str = "load", urgent: bool = False) -> None:
        """See :class:`Reads`. What is ``urgent`` is read before all that is not and has not begun."""

    def begun(self) -> None:
        """Return when all that is urgent is being read, or as much as can be at once. Whoever goes on in the interpreter instead may keep
        it from the readers for as long as it computes."""


@dataclass(eq=False, slots=True)
class _Request:
    """One call of ``read``."""

    extents: Sequence[Extent]
    into: memoryview
    address: int
    name: str
    number: int
    done: Done
    blocks: deque[Block] | None = None
    """That nobody has taken; None until a reader has cut them."""
    pending: Pending | None = None


class ReadPool:
    """``threads`` threads that read blocks in the order of the requests, urgent ones first. So the SSD always has that many reads in
    flight.

    DRAM: ``staging`` (aligned, divided equally between the threads), or ``threads`` × ``block_bytes`` of its own when None. Blocks whose
    alignment allows it are read straight into the buffer with O_DIRECT; the others land in staging and are copied. If the file system
    refuses O_DIRECT, or with ``direct=False``, reads go through the page cache straight to their place. After a refusal the kernel is asked
    to drop those pages from its cache.

    ``preadv`` is ``os.preadv``, or a test's own. ``on_block`` is called on the reading threads. ``usual_s`` is what a read should take: see
    ``Stalls``.
    """

    def __init__(
        self,
        threads: int,
        block_bytes: int,
        staging: memoryview | None = None,
        direct: bool = True,
        preadv: Preadv = os.preadv,
        on_block: OnBlock | None = None,
        usual_s: float = 0.0,
    ):
        if threads < 1 or block_bytes < ALIGN:
            raise UserError(f"queue_depth={threads}, block_bytes={block_bytes}: at least 1 and {ALIGN} are needed")
        self.meter = Meter()
        self.stalls = Stalls(usual_s)
        self._block_bytes = align_down(block_bytes)
        whole = memoryview(mmap.mmap(-1, threads * self._block_bytes)) if staging is None else staging.cast("B")
        self._staged_bytes = min(align_down(len(whole) // threads), self._block_bytes)
        if not self._staged_bytes or address_of(whole) % ALIGN:
            raise UserError(f"staging_bytes={len(whole)}: {threads} threads need at least {threads * ALIGN} page-aligned bytes")
        self._preadv = preadv
        self._on_block = on_block
        self._numbers = itertools.count(1)
        self._files = FileTable(direct)
        self._urgent: deque[_Request] = deque()
        self._usual: deque[_Request] = deque()
        self._calls: SimpleQueue[bool] = SimpleQueue()
        """True calls a thread that sleeps, False ends one."""
        self._awake = 0
        """Threads that were called and have not found the queues empty since: whoever adds a request calls one more, and each calls the
        next. To call all of them would take the thread that launches kernels 30 µs a block."""
        self._order = threading.Lock()
        self._begun = threading.Condition(self._order)
        self._awaited = False
        """Whether somebody waits for it."""
        self._count, self._busy = threads, 0
        self._closed = False
        self._broken: BaseException | None = None
        slices = [whole[i * self._staged_bytes : (i + 1) * self._staged_bytes] for i in range(threads)]
        self._threads = [threading.Thread(target=self._work, args=(s,), name=f"ssd-{i}", daemon=True) for i, s in enumerate(slices)]
        for thread in self._threads:
            thread.start()

    def read(self, extents: Sequence[Extent], into: memoryview, done: Done, name: str = "load", urgent: bool = False) -> None:
        """See :class:`Reads`. What is ``urgent`` is read before all that is not and has not begun."""
        if self._broken is not None:
            raise self._broken
        view = into.cast("B")
        check_fits(extents, len(view))
        request = _Request(extents, view, address_of(view), name, next(self._numbers), done)
        with self._order:
            if self._closed:
                raise StoreError("the reader is closed; open the store again")
            (self._urgent if urgent else self._usual).append(request)
            self._call()

    def begun(self) -> None:
        """See :class:`UrgentReads`."""
        with self._order:
            self._awaited = True
            self._begun.wait_for(self._all_begun, BEGUN_S)
            self._awaited = False

    def _all_begun(self) -> bool:
        return not self._urgent or self._busy == self._count

    def read_now(self, extents: Sequence[Extent], into: memoryview) -> None:
        """``read`` and wait; raises its error."""
        finished = threading.Event()
        errors: list[BaseException] = []

        def done(error: BaseException | None) -> None:
            if error is not None:
                errors.append(error)
            finished.set()

        self.read(extents, into, done)
        finished.wait()
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Fail what is still queued, wait for what is in flight, close the files. A second call does nothing."""
        with self._order:
            self._closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._calls.put(False)
        for thread in threads:
            thread.join()
        self._files.close()

    def __enter__(self) -> ReadPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def direct_files(self) -> tuple[Path, ...]:
        """Files read with O_DIRECT."""
        return self._files.select(lambda f: f.direct)

    @property
    def buffered_files(self) -> tuple[Path, ...]:
        """Files read through the page cache, because they had to be or were asked to."""
        return self._files.select(lambda f: not f.direct)

    def _work(self, staging: memoryview) -> None:
        staging_address = address_of(staging)
        while self._calls.get():
            held = 0
            while self._read_next(staging, staging_address, held):
                held = 1

    def _read_next(self, staging: memoryview, staging_address: int, held: int) -> bool:
        """Read a block, ``held`` others by this thread before; False where there is none. Keeps no buffer alive behind it."""
        taken = self._take(held)
        if taken is None:
            return False
        request, block = taken
        pending = request.pending
        error: Exception | None = None
        try:
            if block is None:
                request.done(None)
                return True
            assert pending is not None, "its blocks are cut"
            if self._closed:
                error = StoreError(f"{block.file}: read at offset {block.offset} was cancelled")
            elif pending.error is None:
                error = self._tried(block, request, staging, staging_address)
            pending.finish(error)
        except BaseException as caught:  # a callback that breaks its promise stops the pool, not only this thread
            self._broken = caught
        return True

    def _take(self, held: int) -> tuple[_Request, Block | None] | None:
        """The next block, None of a request without any; None where nothing is asked for. A thread that gets None sleeps."""
        with self._order:
            self._busy -= held
            queue = self._urgent or self._usual
            if not queue:
                self._awake -= 1
                return None
            request = queue[0]
            if request.blocks is None:
                aligned, nbytes = request.address % ALIGN == 0, len(request.into)
                request.blocks = deque(cut(request.extents, self._block_bytes, self._staged_bytes, nbytes, aligned))
                request.pending = Pending(len(request.blocks), request.done)
            block = request.blocks.popleft() if request.blocks else None
            if not request.blocks:
                queue.popleft()
            if self._urgent or self._usual:
                self._call()
            self._busy += 1
            if self._awaited and self._all_begun():
                self._begun.notify_all()
            return request, block

    def _call(self) -> None:
        """Under the lock: have one thread more look at the queues."""
        if self._awake < self._count:
            self._awake += 1
            self._calls.put(True)

    def _tried(self, block: Block, request: _Request, staging: memoryview, staging_address: int) -> Exception | None:
        """Why ``block`` could not be read."""
        try:
            self._read_block(block, request, staging, staging_address)
        except Exception as caught:  # handed to whoever waits for this read
            return caught
        return None

    def _read_block(self, block: Block, request: _Request, staging: memoryview, staging_address: int) -> None:
        file = self._files.get(block.file)
        fd, direct = file.fd()
        if direct and self._read_direct(fd, file, block, request, staging, staging_address):
            return
        fd, _ = file.fd()
        target = request.into[block.dest : block.dest + block.nbytes]
        self._fill(fd, file.path, [target], block.offset, block.nbytes, 1, request)
        file.done_with(block.offset, block.nbytes)

    def _read_direct(self, fd: int, file: OpenFile, block: Block, request: _Request, staging: memoryview, staging_address: int) -> bool:
        """Read ``block`` with O_DIRECT. False: the file system refuses."""
        lead = block.offset - block.start
        views, copies = targets(block, request.into, staging)
        try:
            self._fill(fd, file.path, views, block.start, lead + block.nbytes, ALIGN, request)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            file.refuse_direct()
            return False
        for source, dest, nbytes in copies:
            ctypes.memmove(request.address + dest, staging_address + source, nbytes)
        return True

    def _fill(self, fd: int, path: Path, views: list[memoryview], offset: int, needed: int, align: int, request: _Request) -> None:
        """Read until ``needed`` bytes from ``offset`` are in ``views``; what may pass is tried again."""
        got = failures = total = 0
        begun = self.meter.begin()
        try:
            while got < needed:
                problem = "the file ends there"
                try:
                    n = self._preadv(fd, after(views, got) if got else views, offset + got)
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
            if self._on_block is not None:
                self._on_block(request.name, request.number, begun, ended, total)
