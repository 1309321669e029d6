"""Threads that read without the interpreter's lock: they are in readers.c, and come back for what is out of the ordinary."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from penstock.planner.common.measures import ALIGN
from penstock.runtime.reading.block_reader import BlockReader, Staging, Target
from penstock.runtime.reading.blocks import Block, check_fits, cut
from penstock.runtime.reading.files import FileTable
from penstock.runtime.reading.landing import address_of, lands
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.native.readers_library import ENDED, ODD, OVER, UNCUT, CFact, CFile, ReadersLibrary
from penstock.runtime.reading.pending import Done
from penstock.runtime.reading.reads_inbox import Heard, Inbox, Ticket
from penstock.runtime.reading.store_errors import StoreError, cancelled, closed

K = TypeVar("K")
NS = 1e-9
MOST_HEARD = 64
"""Reads or facts that are fetched in one call."""
MOST_KEPT = 1 << 17
"""Blocks that stay cut, at most: 160 bytes each."""
_RANGES, _COPIES = 3, 2
_WORDS = 8 + 2 * _RANGES + 3 * _COPIES
_NOWHERE = (0, 0, 0)


class Cut(NamedTuple):
    """The blocks of ``extents`` in a buffer of ``nbytes``, as readers.c knows them: wherever that buffer lies, if it is as ``aligned``."""

    extents: Sequence[Extent]
    nbytes: int
    aligned: bool
    words: array[int]
    address: int
    count: int


@dataclass(eq=False, slots=True)
class _Asked:
    """A call of ``ask`` that is not over; keeps its buffer and its blocks alive."""

    extents: Sequence[Extent]
    target: Target | None
    cut: Cut | None
    """None until a reader has cut them."""
    done: Any
    error: BaseException | None = None


class NativeInbox(Generic[K]):
    """An inbox that readers write without Python."""

    def __init__(self, readers: NativeReaders):
        quick = readers.library.quick
        self._readers = readers
        self._take, self._wait = quick.inbox_take, readers.library.waiting.inbox_wait
        self._numbers = (ctypes.c_int64 * MOST_HEARD)()
        self.address: int = quick.inbox_open()
        if not self.address:
            raise MemoryError("no memory for an inbox")
        weakref.finalize(self, quick.inbox_free, self.address).atexit = False

    def put(self, key: K, error: BaseException | None = None) -> None:
        number = self._readers.number(_Asked((), None, None, Ticket(self, key), error))
        if self._readers.library.quick.inbox_put(self.address, number):
            raise MemoryError("no memory for a number")

    def take(self, most_s: float) -> list[Heard[K]]:
        if most_s:
            came = self._wait(self.address, self._numbers, MOST_HEARD, int(most_s / NS))
        else:
            came = self._take(self.address, self._numbers, MOST_HEARD)
        return [self._heard(number) for number in self._numbers[:came]]

    def _heard(self, number: int) -> Heard[K]:
        asked = self._readers.over(number)
        return asked.done.key, asked.error


class NativeReaders:
    """A thread for each of ``staging``, which lie side by side. See :class:`penstock.runtime.reading.reader.ReadPool`.

    A thread takes the interpreter's lock once a request, to call its ``done``; never for a request with a :class:`Ticket`. What happened to
    a block is noted in C and booked when somebody asks, or after some hundreds.
    """

    def __init__(self, library: ReadersLibrary, staging: Sequence[memoryview], block_bytes: int, files: FileTable, blocks: BlockReader):
        self.library = library
        self.broken: BaseException | None = None
        self.closed = False
        self._block_bytes, self._staged_bytes = block_bytes, len(staging[0])
        self._files, self._blocks = files, blocks
        self._opened: dict[Path, CFile] = {}
        self._paths: dict[int, Path] = {}
        self._cuts: dict[int, Cut] = {}
        self._kept = 0
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._inboxes: list[NativeInbox[Any]] = []
        self._order, self._hearing = threading.Lock(), threading.Lock()
        self._facts = (CFact * MOST_HEARD)()
        self._names: dict[int, str] = {}
        """Of requests, for spans."""
        self._process = os.getpid()
        own = [Staging.of(view) for view in staging]
        self._pool: int | None = library.quick.readers_open(len(own), own[0].address, self._staged_bytes)
        if not self._pool:
            raise MemoryError("no memory for readers")
        self._stop = weakref.finalize(self, library.quick.readers_stop, self._pool)
        self._threads = [threading.Thread(target=self._work, args=(i, one), name=f"ssd-{i}", daemon=True) for i, one in enumerate(own)]
        for thread in self._threads:
            thread.start()

    def ask(self, parts: Sequence[Sequence[Extent]], into: memoryview, dones: Sequence[Done], name: str, urgent: bool) -> None:
        """Queue a call of ``read`` for each of ``parts``."""
        address, words = address_of(into), array("q")
        nbytes, aligned, numbers = len(into), address % ALIGN == 0, []
        with self._order:
            if self.closed:
                raise closed()
            for extents, done in zip(parts, dones, strict=True):
                blocks = self._known(extents, nbytes, aligned)
                number = next(self._numbers)
                self._asked[number] = _Asked(extents, Target(into, address, name, number), blocks, done)
                numbers.append(number)
                inbox = done.inbox.address if isinstance(done, Ticket) and isinstance(done.inbox, NativeInbox) else 0
                words.extend((0, 0, number, inbox) if blocks is None else (blocks.address, blocks.count, number, inbox))
            if self._blocks.on_block is not None:
                self._names |= dict.fromkeys(numbers, name)
            if self.library.quick.readers_ask(self._pool, words.buffer_info()[0], len(numbers), address, urgent):
                for number in numbers:
                    del self._asked[number]
                raise MemoryError("no memory for a read")

    def inbox(self) -> Inbox[Any]:
        self._inboxes.append(NativeInbox(self))
        return self._inboxes[-1]

    def begun(self) -> None:
        """Nothing keeps a thread from what is urgent."""

    def number(self, asked: _Asked) -> int:
        """By which C knows it until :meth:`over`."""
        number = next(self._numbers)
        self._asked[number] = asked
        return number

    def over(self, number: int) -> _Asked:
        """A request that C is through with."""
        asked = self._asked.pop(number)
        if self._names:
            self.hear()
            self._names.pop(number, None)
        return asked

    def hear(self) -> None:
        """Book what was read since the last call."""
        with self._hearing:
            while self._pool is not None:
                heard = self.library.quick.readers_hear(self._pool, self._facts, MOST_HEARD)
                for fact in self._facts[:heard]:
                    self._book(fact)
                if heard < MOST_HEARD:
                    return

    def _book(self, fact: CFact) -> None:
        begun, ended, blocks = fact.begun_ns * NS, fact.ended_ns * NS, self._blocks
        if not fact.ended_ns:
            blocks.meter.begin(begun)
        elif fact.bytes < 0:
            blocks.meter.give_up(ended)
        else:
            blocks.meter.end(fact.bytes, ended)
            blocks.stalls.note(ended - begun, self._paths[fact.file], fact.offset)
            if blocks.on_block is not None:
                blocks.on_block(f"ssd-{fact.reader}", self._names[fact.number], fact.number, begun, ended, fact.bytes)

    def close(self) -> None:
        """Fail what is still queued, wait for what is in flight. A second call does nothing."""
        with self._order:
            self.closed = True
            threads, self._threads = self._threads, []
            if threads and os.getpid() == self._process:  # a forked process has no threads, and maybe somebody's lock
                self.library.quick.readers_close(self._pool)
        for thread in threads:
            thread.join()
        self._stop.detach()
        if threads and os.getpid() == self._process:
            self.hear()
            with self._hearing:
                pool, self._pool = self._pool, None
                self.library.quick.readers_free(pool)

    def _work(self, me: int, staging: Staging) -> None:
        work, told = self.library.waiting.readers_work, (ctypes.c_int64 * 2)()
        while (why := work(self._pool, me, told)) != ENDED:
            try:
                if why == ODD:
                    self._mend(me, told[0], told[1], staging)
                elif why == OVER:
                    self._tell(told[0])
                elif why == UNCUT:
                    self._cut(me, told[0])
                else:
                    self.hear()
            except BaseException as caught:  # a callback that breaks its promise stops the pool, not only this thread
                self.broken = caught

    def _tell(self, number: int) -> None:
        asked = self.over(number)
        asked.done(asked.error)

    def _mend(self, me: int, number: int, index: int, staging: Staging) -> None:
        """Read a block that readers.c could not, or say why it cannot be read."""
        asked = self._asked[number]
        assert asked.target is not None and asked.cut is not None, "it has blocks"
        error: BaseException | None = None
        try:
            block = next(itertools.islice(self._blocks_of(asked.cut), index, None))
            if self.closed:
                error = cancelled(block)
            elif asked.error is None:
                self.hear()
                error = self._blocks.tried(block, asked.target, staging)
                self._open(block.file)
        except BaseException as caught:
            error = caught
            raise
        finally:
            asked.error = asked.error or error
            del asked
            if self.library.quick.readers_mended(self._pool, me, error is not None):
                self._tell(number)

    def _known(self, extents: Sequence[Extent], nbytes: int, aligned: bool) -> Cut | None:
        """The blocks of ``extents``, if they are kept."""
        found = self._cuts.get(id(extents))
        if found is not None and found.extents is extents and found.nbytes == nbytes and found.aligned == aligned:
            return found
        check_fits(extents, nbytes)
        return None

    def _cut(self, me: int, number: int) -> None:
        """Cut a request into blocks. Those of a tuple are kept: units and experts are read again and again."""
        asked, made = self._asked[number], None
        assert asked.target is not None, "it was asked for"
        extents, nbytes, aligned = asked.extents, len(asked.target.into), asked.target.address % ALIGN == 0
        words = array("q")
        try:
            for block in cut(extents, self._block_bytes, self._staged_bytes, nbytes, aligned):
                words.extend(self._words(block))
        except BaseException as caught:
            asked.error = caught
            del words[:]
            raise
        finally:
            made = asked.cut = Cut(extents, nbytes, aligned, words, words.buffer_info()[0], len(words) // _WORDS)
            self.library.quick.readers_cut(self._pool, me, made.address, made.count)
        if isinstance(extents, tuple):
            if self._kept > MOST_KEPT:
                self._cuts.clear()
                self._kept = 0
            self._cuts[id(extents)] = made
            self._kept += made.count

    def _blocks_of(self, cut_: Cut) -> Iterator[Block]:
        return cut(cut_.extents, self._block_bytes, self._staged_bytes, cut_.nbytes, cut_.aligned)

    def _words(self, block: Block) -> Iterator[int]:
        """``struct block``."""
        ranges, copies = lands(block)
        yield ctypes.addressof(self._opened.get(block.file) or self._open(block.file))
        yield from (
            block.offset,
            block.nbytes,
            block.dest,
            block.start,
            block.offset - block.start + block.nbytes,
            len(ranges),
            len(copies),
        )
        for staged, at, nbytes in ranges:
            yield from (-1 - at if staged else at, nbytes)
        yield from itertools.repeat(0, 2 * (_RANGES - len(ranges)))
        for copied in (*copies, *[_NOWHERE] * (_COPIES - len(copies))):
            yield from copied

    def _open(self, path: Path) -> CFile:
        """How ``path`` is to be read from now on. One that cannot be opened comes back as odd, and is told of there."""
        file, state = self._files.get(path), -1
        try:
            fd, direct = file.fd()
            state = 4 * fd + 2 * file.forget + direct
        except StoreError:
            pass
        found = self._opened.setdefault(path, CFile(state))
        found.state = state
        self._paths[ctypes.addressof(found)] = path
        return found
