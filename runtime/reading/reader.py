"""Reads from the SSD: what is asked of readers, and the pool of those that keep many reads in flight."""

from __future__ import annotations

import mmap
import os
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, Protocol, TypeVar

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN, align_down
from penstock.runtime.memory.bare_copies import DriverCalls
from penstock.runtime.reading.block_reader import BlockReader, OnBlock, Preadv
from penstock.runtime.reading.files import FileTable
from penstock.runtime.reading.landing import address_of
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.native.native_carrier import NativeCarrier
from penstock.runtime.reading.native.native_order import Brought, Come, Looks, Order
from penstock.runtime.reading.native.readers_library import readers_library
from penstock.runtime.reading.native_readers import NativeReaders
from penstock.runtime.reading.pending import Done
from penstock.runtime.reading.python_readers import PythonReaders
from penstock.runtime.reading.read_meter import Meter
from penstock.runtime.reading.reads_inbox import Inbox
from penstock.runtime.reading.stalls import Stalls

K = TypeVar("K")


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

    def read_each(
        self, parts: Sequence[Sequence[Extent]], into: memoryview, dones: Sequence[Done], name: str = "load", urgent: bool = False
    ) -> None:
        """A :meth:`read` of each of ``parts`` with its own of ``dones``, in one call: to wake a reader takes the caller longer than the
        rest."""

    def expect(self, parts: Sequence[Sequence[Extent]], nbytes: int) -> None:
        """Each of ``parts`` will be read, as the same tuple, into aligned buffers of ``nbytes``. What can be done before is done now."""

    def carrier(self, calls: DriverCalls) -> NativeCarrier | None:
        """Lets reading threads copy on what comes, by ``calls``, of an :meth:`order`; None where they cannot."""

    def order(
        self, name: str, parts: Sequence[Sequence[Extent]], nbytes: int, segments: Sequence[array[int]], looks: Looks | None = None
    ) -> Order[Sequence[Extent]]:
        """``parts`` of what is called ``name``, which come again and again into aligned buffers of ``nbytes``. Of each, ``segments`` are
        copied on, as a carrier's ``words`` gives them. Only where there is a :meth:`carrier`; so is :meth:`bring`."""

    def bring(self, brought: Sequence[Brought[K]], inbox: Inbox[K]) -> Come:
        """Read orders that a carrier was told to carry, each into its buffer, urgently. Each part is copied on when it has come; ``inbox``
        hears of all parts of one at once. One call asks for all: to wake a reader takes the caller longer than the rest. What is returned
        sleeps for them."""

    def begun(self) -> None:
        """Return when all that is urgent is being read, or as much as can be at once. Whoever goes on in the interpreter instead may keep
        it from the readers for as long as it computes."""

    def inbox(self) -> Inbox[Any]:
        """A new one, for a :class:`penstock.runtime.reading.reads_inbox.Ticket` as ``done``: such a read keeps no reading thread from its
        next one."""


class ReadPool:
    """``threads`` threads that read blocks in the order of the requests, urgent ones first. So the SSD always has that many reads in
    flight.

    DRAM: ``staging`` (aligned, divided equally between the threads), or ``threads`` × ``block_bytes`` of its own when None. Blocks whose
    alignment allows it are read straight into the buffer with O_DIRECT; the others land in staging and are copied. If the file system
    refuses O_DIRECT, or with ``direct=False``, reads go through the page cache straight to their place. After a refusal the kernel is asked
    to drop those pages from its cache.

    The threads are those of ``NativeReaders``, which read without the interpreter. Where nothing is compiled, or ``preadv`` is a function
    in Python, they are those of ``PythonReaders``. ``on_block`` is called when a block is booked. ``usual_s`` is what a read should take:
    see ``Stalls``.
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
        block_bytes = align_down(block_bytes)
        whole = memoryview(mmap.mmap(-1, threads * block_bytes)) if staging is None else staging.cast("B")
        staged_bytes = min(align_down(len(whole) // threads), block_bytes)
        if not staged_bytes or address_of(whole) % ALIGN:
            raise UserError(f"staging_bytes={len(whole)}: {threads} threads need at least {threads * ALIGN} page-aligned bytes")
        self._files = FileTable(direct)
        self._blocks = BlockReader(self._files, preadv, Stalls(usual_s), on_block)
        slices = [whole[i * staged_bytes : (i + 1) * staged_bytes] for i in range(threads)]
        library = readers_library() if isinstance(preadv, BuiltinFunctionType) else None
        self._readers: NativeReaders | PythonReaders
        if library is None:
            self._readers = PythonReaders(slices, block_bytes, self._blocks)
        else:
            self._readers = NativeReaders(library, slices, block_bytes, self._files, self._blocks)

    @property
    def meter(self) -> Meter:
        """With all that was read until now."""
        self._readers.hear()
        return self._blocks.meter

    @property
    def stalls(self) -> Stalls:
        """Likewise."""
        self._readers.hear()
        return self._blocks.stalls

    def read(self, extents: Sequence[Extent], into: memoryview, done: Done, name: str = "load", urgent: bool = False) -> None:
        """See :class:`UrgentReads`."""
        self.read_each((extents,), into, (done,), name, urgent)

    def read_each(
        self, parts: Sequence[Sequence[Extent]], into: memoryview, dones: Sequence[Done], name: str = "load", urgent: bool = False
    ) -> None:
        """See :class:`UrgentReads`."""
        if self._readers.broken is not None:
            raise self._readers.broken
        self._readers.ask(parts, into if into.format == "B" else into.cast("B"), dones, name, urgent)

    def expect(self, parts: Sequence[Sequence[Extent]], nbytes: int) -> None:
        """See :class:`UrgentReads`."""
        self._readers.expect(parts, nbytes)

    def inbox(self) -> Inbox[Any]:
        """See :class:`UrgentReads`."""
        return self._readers.inbox()

    def carrier(self, calls: DriverCalls) -> NativeCarrier | None:
        """See :class:`UrgentReads`."""
        return self._readers.carrier(calls)

    def order(
        self, name: str, parts: Sequence[Sequence[Extent]], nbytes: int, segments: Sequence[array[int]], looks: Looks | None = None
    ) -> Order[Sequence[Extent]]:
        """See :class:`UrgentReads`."""
        readers = self._readers
        assert isinstance(readers, NativeReaders), "they gave a carrier"
        return readers.order(name, parts, nbytes, segments, looks)

    def bring(self, brought: Sequence[Brought[K]], inbox: Inbox[K]) -> Come:
        """See :class:`UrgentReads`."""
        if self._readers.broken is not None:
            raise self._readers.broken
        readers = self._readers
        assert isinstance(readers, NativeReaders), "they gave a carrier"
        return readers.bring(brought, inbox)

    def begun(self) -> None:
        """See :class:`UrgentReads`."""
        self._readers.begun()

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
        self._readers.close()
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
