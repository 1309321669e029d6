"""Threads of the interpreter's that read block by block: where nothing is compiled, or a caller reads in a way of its own."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from penstock.planner.common.measures import ALIGN
from penstock.runtime.memory.bare_copies import DriverCalls
from penstock.runtime.reading.block_reader import BlockReader, Staging, Target
from penstock.runtime.reading.blocks import Block, check_fits, cut, runs
from penstock.runtime.reading.landing import address_of
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.native.native_carrier import NativeCarrier
from penstock.runtime.reading.pending import Done, Pending
from penstock.runtime.reading.reads_inbox import Inbox, PlainInbox
from penstock.runtime.reading.store_errors import cancelled, closed

BEGUN_S = 0.002
"""How long :meth:`PythonReaders.begun` waits at most: on a busy host readers may come to run late."""


@dataclass(eq=False, slots=True)
class _Request:
    """One call of ``ask``."""

    extents: Sequence[Extent]
    target: Target
    done: Done
    blocks: deque[Block] | None = None
    """That nobody has taken; None until a reader has cut them."""
    pending: Pending | None = None


class PythonReaders:
    """A thread for each of ``staging``. See :class:`penstock.runtime.reading.reader.ReadPool`."""

    def __init__(self, staging: Sequence[memoryview], block_bytes: int, blocks: BlockReader):
        self.broken: BaseException | None = None
        self._block_bytes, self._staged_bytes = block_bytes, len(staging[0])
        self._blocks = blocks
        self._numbers = itertools.count(1)
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
        self._count, self._busy = len(staging), 0
        self.closed = False
        own = [Staging.of(view) for view in staging]
        self._threads = [threading.Thread(target=self._work, args=(one,), name=f"ssd-{i}", daemon=True) for i, one in enumerate(own)]
        for thread in self._threads:
            thread.start()

    def ask(self, parts: Sequence[Sequence[Extent]], into: memoryview, dones: Sequence[Done], name: str, urgent: bool) -> None:
        """Queue a call of ``read`` for each of ``parts``."""
        address = address_of(into)
        for extents in parts:
            check_fits(extents, len(into))
        with self._order:
            if self.closed:
                raise closed()
            for extents, done in zip(parts, dones, strict=True):
                (self._urgent if urgent else self._usual).append(_Request(extents, Target(into, address, name, next(self._numbers)), done))
                self._call()

    def expect(self, parts: Sequence[Sequence[Extent]], nbytes: int) -> None:
        """Extents are cut when they are read."""

    def carrier(self, calls: DriverCalls) -> NativeCarrier | None:
        return None

    def inbox(self) -> Inbox[Any]:
        return PlainInbox()

    def begun(self) -> None:
        """Return when all that is urgent is being read, or as much as can be at once."""
        with self._order:
            self._awaited = True
            self._begun.wait_for(self._all_begun, BEGUN_S)
            self._awaited = False

    def _all_begun(self) -> bool:
        return not self._urgent or self._busy == self._count

    def hear(self) -> None:
        """All that was read is booked."""

    def close(self) -> None:
        """Fail what is still queued, wait for what is in flight. A second call does nothing."""
        with self._order:
            self.closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._calls.put(False)
        for thread in threads:
            thread.join()

    def _work(self, staging: Staging) -> None:
        while self._calls.get():
            held = 0
            while self._read_next(staging, held):
                held = 1

    def _read_next(self, staging: Staging, held: int) -> bool:
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
            if self.closed:
                error = cancelled(block)
            elif pending.error is None:
                error = self._blocks.tried(block, request.target, staging)
            pending.finish(error)
        except BaseException as caught:  # a callback that breaks its promise stops the pool, not only this thread
            self.broken = caught
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
                aligned, nbytes = request.target.address % ALIGN == 0, len(request.target.into)
                request.blocks = deque(cut(runs(request.extents, self._block_bytes, self._staged_bytes, nbytes, aligned)))
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
