"""Threads that read without the interpreter's lock: they are in readers.c, and come back for what is out of the ordinary."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from penstock.planner.common.measures import ALIGN
from penstock.runtime.memory.bare_copies import DriverCalls
from penstock.runtime.reading.block_reader import BlockReader, Staging, Target
from penstock.runtime.reading.blocks import Block, Landing
from penstock.runtime.reading.files import FileTable
from penstock.runtime.reading.known_runs import KnownRuns
from penstock.runtime.reading.landing import address_of
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.native.native_carrier import NativeCarrier
from penstock.runtime.reading.native.native_order import PART_WORDS, Brought, Come, Looks, Order, part_words
from penstock.runtime.reading.native.readers_library import ENDED, ODD, OVER, CFact, ReadersLibrary
from penstock.runtime.reading.pending import Done
from penstock.runtime.reading.reads_inbox import Heard, Inbox, Look, Ticket
from penstock.runtime.reading.store_errors import cancelled, closed

K = TypeVar("K")
NS = 1e-9
SLEEP_NS = 1_000_000_000
"""How long one call sleeps at most for what is to come."""
_ASKED_WORDS = 9
"""Of ``struct asked``."""
MOST_HEARD = 64
"""Reads or facts that are fetched in one call."""


def _stop(library: ReadersLibrary, pool: int, process: int) -> None:
    """The interpreter ends, with threads that read: they begin nothing any more."""
    if os.getpid() == process:
        library.quick.readers_stop(pool)


@dataclass(eq=False, slots=True)
class _Asked:
    """A call of ``read`` that is not over, into ``into``, which lies at ``address``; keeps alive what C looks at."""

    done: Any
    error: BaseException | None = None
    into: memoryview | None = None
    address: int = 0
    name: str = ""
    keeps: object = None


class NativeInbox(Generic[K]):
    """An inbox that readers write without Python."""

    def __init__(self, readers: NativeReaders):
        quick = readers.library.quick
        self.readers = readers
        self._take, self._wait = quick.inbox_take, readers.library.waiting.inbox_wait
        self._numbers = (ctypes.c_int64 * MOST_HEARD)()
        self.address: int = quick.inbox_open()
        if not self.address:
            raise MemoryError("no memory for an inbox")
        self._held = ctypes.c_int64.from_address(self.address)
        weakref.finalize(self, quick.inbox_free, self.address).atexit = False

    def put(self, key: K, error: BaseException | None = None) -> None:
        number = self.readers.number(_Asked(Ticket(self, key), error))
        if self.readers.library.quick.inbox_put(self.address, number):
            raise MemoryError("no memory for a number")

    def take(self, most_s: float, least: int = 1) -> list[Heard[K]]:
        held = self._held.value  # to look there takes a tenth of a call
        if most_s and held < least:
            came = self._wait(self.address, self._numbers, MOST_HEARD, int(most_s / NS), min(least, MOST_HEARD))
        else:
            came = self._take(self.address, self._numbers, MOST_HEARD) if held else 0
        return self.readers.heard(self._numbers[:came]) if came else []


class NativeReaders:
    """A thread for each of ``staging``, which lie side by side. See :class:`penstock.runtime.reading.reader.ReadPool`.

    A thread takes the interpreter's lock once a request, to call its ``done``; never for a request with a :class:`Ticket`. What happened to
    a block is noted in C and booked when somebody asks, or after some hundreds.
    """

    def __init__(self, library: ReadersLibrary, staging: Sequence[memoryview], block_bytes: int, files: FileTable, blocks: BlockReader):
        self.library = library
        self.broken: BaseException | None = None
        self.closed = False
        self._blocks = blocks
        self._known = KnownRuns(files, block_bytes, len(staging[0]))
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._inboxes: list[NativeInbox[Any]] = []
        self._order, self._hearing = threading.Lock(), threading.Lock()
        self._come = library.waiting.orders_come
        self._facts = (CFact * MOST_HEARD)()
        self._names: dict[int, str] = {}
        """Of requests, for spans."""
        self._ended: deque[int] = deque()
        """Requests that are over and whose names may still be asked for."""
        self._process = os.getpid()
        own = [Staging.of(view) for view in staging]
        self._pool: int | None = library.quick.readers_open(len(own), own[0].address, len(staging[0]))
        if not self._pool:
            raise MemoryError("no memory for readers")
        self._stop = weakref.finalize(self, _stop, library, self._pool, self._process)
        self._threads = [threading.Thread(target=self._work, args=(i, one), name=f"ssd-{i}", daemon=True) for i, one in enumerate(own)]
        for thread in self._threads:
            thread.start()

    def ask(self, parts: Sequence[Sequence[Extent]], into: memoryview, dones: Sequence[Done], name: str, urgent: bool) -> None:
        """Queue a call of ``read`` for each of ``parts``."""
        address, known = address_of(into), self._known.of
        nbytes, aligned, count = len(into), address % ALIGN == 0, len(parts)
        with self._order:
            if self.closed:
                raise closed()
            found = [known(extents, nbytes, aligned) for extents in parts]
            words = array("q", bytes(8 * count * (_ASKED_WORDS + PART_WORDS)))
            asked, part_at = words.buffer_info()[0], 8 * count * _ASKED_WORDS
            numbers = [next(self._numbers) for _ in parts]
            for i, (number, each, done) in enumerate(zip(numbers, found, dones, strict=True)):
                inbox, look = 0, None
                self._asked[number] = _Asked(done, None, into, address, name, (each, words))
                if isinstance(done, Ticket) and isinstance(done.inbox, NativeInbox) and done.inbox.readers is self:
                    inbox, look = done.inbox.address, done.look
                at, part = i * _ASKED_WORDS, count * _ASKED_WORDS + i * PART_WORDS
                words[at : at + _ASKED_WORDS] = array("q", (asked + part_at + 8 * i * PART_WORDS, 1, number, inbox, 0, 0, 0, 0, address))
                runs = each.address, len(each.extents)
                words[part : part + PART_WORDS] = array("q", part_words(runs, look.words if isinstance(look, Look) else None))
            if self._blocks.on_block is not None:
                self._names |= dict.fromkeys(numbers, name)
            self._ask(array("q", [asked + 8 * i * _ASKED_WORDS for i in range(count)]), numbers, urgent)

    def order(
        self, name: str, parts: Sequence[Sequence[Extent]], nbytes: int, segments: Sequence[array[int]], looks: Looks | None
    ) -> Order[Sequence[Extent]]:
        """``parts`` as they come into aligned buffers of ``nbytes``, to be copied on by ``segments`` of each."""
        with self._order:
            runs = [self._known.of(extents, nbytes, aligned=True) for extents in parts]
        order = Order(name, parts, [(one.address, len(one.extents)) for one in runs], segments, looks, runs)
        order.asked = _Asked(None, name=name)
        return order

    def bring(self, brought: Sequence[Brought[K]], inbox: Inbox[K]) -> Come:
        """Queue orders, before all that is not urgent."""
        to, addresses = inbox.address, array("q", [order.address for order, *_ in brought])  # type: ignore[attr-defined]
        numbers: list[int] = []
        named = self._blocks.on_block is not None
        with self._order:
            if self.closed:
                raise closed()
            for order, key, into, address in brought:
                number, asked = next(self._numbers), order.asked
                order.come(number, to, into, address)
                if asked.done is None:
                    asked.done = Ticket(inbox, key, order)
                asked.done.inbox, asked.done.key = inbox, key
                asked.error, asked.into, asked.address = None, into, address
                self._asked[number] = asked
                if named:
                    self._names[number] = order.name
                numbers.append(number)
            self._ask(addresses, numbers, True)
        return partial(self._sleep, addresses, to)

    def _sleep(self, addresses: array[int], inbox: int, after_s: float) -> int | None:
        """What :meth:`bring` returns, of the orders at ``addresses``, of which the inbox whose struct lies at ``inbox`` hears."""
        at, count = addresses.buffer_info()
        part: int = self._come(inbox, at, count, SLEEP_NS, int(after_s / NS))
        return part if part >= 0 else None

    def _ask(self, asked: array[int], numbers: Sequence[int], urgent: bool) -> None:
        """``struct asked`` of each of ``numbers`` lies at one of ``asked``."""
        if self.library.quick.readers_ask(self._pool, asked.buffer_info()[0], len(numbers), urgent):
            for number in numbers:
                del self._asked[number]
            raise MemoryError("no memory for a read")

    def expect(self, parts: Sequence[Sequence[Extent]], nbytes: int) -> None:
        """Keep the runs of ``parts``."""
        with self._order:
            for extents in parts:
                self._known.of(extents, nbytes, aligned=True)

    def inbox(self) -> Inbox[Any]:
        self._inboxes.append(NativeInbox(self))
        return self._inboxes[-1]

    def carrier(self, calls: DriverCalls) -> NativeCarrier | None:
        return NativeCarrier(self.library, calls)

    def begun(self) -> None:
        """Nothing keeps a thread from what is urgent."""

    def number(self, asked: _Asked) -> int:
        """By which C knows it until :meth:`over`."""
        number = next(self._numbers)
        self._asked[number] = asked
        return number

    def heard(self, numbers: Sequence[int]) -> list[Heard[Any]]:
        """Keys and errors of requests that C is through with."""
        over = [self._asked.pop(number) for number in numbers]
        if self._names:
            self._ended.extend(numbers)
        return [(asked.done.key, asked.error) for asked in over]

    def over(self, number: int) -> _Asked:
        """A request that C is through with."""
        asked = self._asked.pop(number)
        if self._names:
            self._ended.append(number)
        return asked

    def hear(self) -> None:
        """Book what was read since the last call."""
        with self._hearing:
            ended, heard = len(self._ended), MOST_HEARD
            while heard == MOST_HEARD and self._pool is not None:
                heard = self.library.quick.readers_hear(self._pool, self._facts, MOST_HEARD)
                for fact in self._facts[:heard]:
                    self._book(fact)
            for _ in range(ended):  # C noted their last facts before they were over
                self._names.pop(self._ended.popleft(), None)

    def _book(self, fact: CFact) -> None:
        begun, ended, blocks = fact.begun_ns * NS, fact.ended_ns * NS, self._blocks
        if not fact.ended_ns:
            blocks.meter.begin(begun)
        elif fact.bytes < 0:
            blocks.meter.give_up(ended)
        else:
            blocks.meter.end(fact.bytes, ended)
            blocks.stalls.note(ended - begun, self._known.path(fact.file), fact.offset)
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
        work, told = self.library.waiting.readers_work, (ctypes.c_int64 * 6)()
        while (why := work(self._pool, me, told)) != ENDED:
            try:
                if why == ODD:
                    self._mend(me, told[0], told[1:], staging)
                elif why == OVER:
                    self._tell(told[0])
                else:
                    self.hear()
            except BaseException as caught:  # a callback that breaks its promise stops the pool, not only this thread
                self.broken = caught

    def _tell(self, number: int) -> None:
        asked = self.over(number)
        asked.done(asked.error)

    def _mend(self, me: int, number: int, block: Sequence[int], staging: Staging) -> None:
        """Read a block that readers.c could not, ``struct block``, or say why it cannot be read."""
        asked, error = self._asked[number], None
        file, offset, nbytes, dest, landing = block
        odd = Block(self._known.path(file), offset, nbytes, dest, Landing(landing))
        assert asked.into is not None, "it has blocks"
        target = Target(asked.into, asked.address, asked.name, number)
        try:
            if asked.error is None:
                self.hear()
                error = cancelled(odd) if self.closed else self._blocks.tried(odd, target, staging)
                self._known.open(odd.file)
        finally:
            asked.error = asked.error or error
            del asked, target
            if self.library.waiting.readers_mended(self._pool, me, error is not None):  # for a carrier that another reader has
                self._tell(number)
