"""Scales that lie between the weights, looked at when their bytes first come to memory: of blocks in GGUF files, of coded experts."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from penstock.planner.common.errors import UserError
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.native.native_order import Looks, Order
from penstock.runtime.reading.pending import Done
from penstock.runtime.reading.read_meter import Meter
from penstock.runtime.reading.reader import Reads, UrgentReads
from penstock.runtime.reading.reads_inbox import Look, Ticket
from penstock.runtime.store.scales import Scale, no_numbers


class MeteredReads(Reads, Protocol):
    """Reads whose bytes are booked."""

    meter: Meter


class ArrivingScales:
    """``scales`` by where they lie in their files."""

    def __init__(self, scales: Iterable[Scale]):
        self._in_file: dict[Path, list[Scale]] = defaultdict(list)
        for scale in sorted(scales, key=lambda scale: scale.entry.offset):
            self._in_file[scale.entry.file].append(scale)
        self._begins = {file: [scale.entry.offset for scale in found] for file, found in self._in_file.items()}

    def __bool__(self) -> bool:
        return bool(self._in_file)

    def refuse(self, extents: Iterable[Extent], into: memoryview) -> None:
        """UserError names the first tensor whose scales, as far as they lie in ``extents``, are no numbers. Takes no memory but two bytes
        for each block of 32 or 256 weights."""
        for scale, at, nbytes, begin in self._among(extents):
            if not scale.is_sound(into[at : at + nbytes], begin):
                raise no_numbers(scale)

    def words(self, extents: Iterable[Extent]) -> array[int]:
        """The same as :class:`penstock.runtime.reading.reads_inbox.Look` takes it; none where there are no scales."""
        found = array("q")
        for scale, at, nbytes, begin in self._among(extents):
            for numbers in scale.numbers(nbytes, begin):
                found.extend((at + numbers.at, *numbers[1:]))
        return found

    def _among(self, extents: Iterable[Extent]) -> Iterator[tuple[Scale, int, int, int]]:
        """(scale, where in the buffer, bytes, first byte of its tensor) of what lies in ``extents``."""
        for extent in extents:
            found, end = self._in_file.get(extent.file, []), extent.offset + extent.nbytes
            for n in range(max(0, bisect_right(self._begins.get(extent.file, []), extent.offset) - 1), len(found)):
                entry = found[n].entry
                if entry.offset >= end:
                    break
                begin = max(extent.offset, entry.offset)
                nbytes = min(end, entry.offset + entry.nbytes) - begin
                if nbytes > 0:
                    yield found[n], extent.dest + begin - extent.offset, nbytes, begin - entry.offset


class SoundReads:
    """``source``, whose reads fail that bring scales which are no numbers. Bytes are looked at when they first come, on the reading
    thread: a block's scales are 2 to 4 of its 18 to 210 bytes."""

    def __init__(self, source: Reads, scales: ArrivingScales):
        self._source, self._scales = source, scales
        self._seen: set[tuple[Path, int, int]] = set()
        self._sound: dict[int, tuple[Extent, ...]] = {}
        """Extents of calls that were looked at, or are by readers now; a tuple is kept and comes again."""
        self._expected: dict[int, tuple[tuple[Extent, ...], array[int]]] = {}
        """Of those that will come, with what there is to look at."""

    def read(self, extents: Sequence[Extent], into: memoryview, done: Done, name: str = "load", urgent: bool = False) -> None:
        """See :class:`penstock.runtime.reading.reader.Reads`; ``urgent``: of a pool of readers alone."""
        done = self._checked(extents, into, done)
        if urgent:
            self._source.read(extents, into, done, name, urgent=True)  # type: ignore[call-arg]
        else:
            self._source.read(extents, into, done, name)

    def _checked(self, extents: Sequence[Extent], into: memoryview, done: Done) -> Done:
        """``done`` behind a look at what comes for the first time. Readers look by themselves at what a ticket is for."""
        if not self._scales or self._sound.get(id(extents)) is extents:
            return done
        if isinstance(done, Ticket) and isinstance(extents, tuple):
            words = self._words(extents)
            return Ticket(done.inbox, done.key, Look(words, partial(self._refusal, extents, into))) if words else done
        new = [e for e in extents if (e.file, e.offset, e.nbytes) not in self._seen]
        if not new:
            return done

        def landed(error: BaseException | None) -> None:
            if error is None:
                error = self._refusal(new, into)
            if error is None:
                self._seen.update((e.file, e.offset, e.nbytes) for e in new)
            done(error)

        return landed

    def _words(self, extents: tuple[Extent, ...]) -> array[int]:
        """What there is to look at in what comes now, by readers; nothing where it has come before."""
        if self._sound.get(id(extents)) is extents:
            return array("q")
        self._sound[id(extents)] = extents
        return self._words_of(extents)

    def _words_of(self, extents: Sequence[Extent]) -> array[int]:
        expected = self._expected.get(id(extents))
        return self._scales.words(extents) if expected is None else expected[1]

    def _refusal(self, extents: Iterable[Extent], into: memoryview) -> UserError | None:
        """Of what has come, for whoever waits for this read."""
        try:
            self._scales.refuse(extents, into.cast("B"))
        except UserError as caught:
            return caught
        return None


class MeteredSoundReads(SoundReads):
    """The same with the meter of its source."""

    def __init__(self, source: MeteredReads, scales: ArrivingScales):
        super().__init__(source, scales)
        self.meter = source.meter


class UrgentSoundReads(SoundReads):
    """The same, some of it before the rest."""

    def __init__(self, source: UrgentReads, scales: ArrivingScales):
        super().__init__(source, scales)
        self.begun, self.inbox, self._read_each, self._expect = source.begun, source.inbox, source.read_each, source.expect
        self.carrier, self.bring, self._order = source.carrier, source.bring, source.order
        self._part_of: dict[int, tuple[Order[Sequence[Extent]], int]] = {}
        """Extents that are parts of orders, and which."""

    def expect(self, parts: Sequence[Sequence[Extent]], nbytes: int) -> None:
        """See :class:`penstock.runtime.reading.reader.UrgentReads`."""
        for extents in parts if self._scales else ():
            if isinstance(extents, tuple) and id(extents) not in self._sound:
                self._expected[id(extents)] = extents, self._scales.words(extents)
        self._expect(parts, nbytes)

    def read_each(
        self, parts: Sequence[Sequence[Extent]], into: memoryview, dones: Sequence[Done], name: str = "load", urgent: bool = False
    ) -> None:
        """See :class:`penstock.runtime.reading.reader.UrgentReads`."""
        if self._scales:
            dones = [self._checked(extents, into, done) for extents, done in zip(parts, dones, strict=True)]
        self._read_each(parts, into, dones, name, urgent)

    def order(
        self, name: str, parts: Sequence[Sequence[Extent]], nbytes: int, segments: Sequence[array[int]], looks: Looks | None = None
    ) -> Order[Sequence[Extent]]:
        """See :class:`penstock.runtime.reading.reader.UrgentReads`. It is looked at by readers alone, who know when it was sound."""
        if self._scales and looks is None:
            words = [array("q") if self._sound.get(id(extents)) is extents else self._words_of(extents) for extents in parts]
            looks = Looks(words, partial(self._refusal, [extent for part in parts for extent in part])) if any(words) else None
        order = self._order(name, parts, nbytes, segments, looks)
        if looks is not None:
            self._part_of |= {id(extents): (order, part) for part, extents in enumerate(parts)}
        return order

    def _words(self, extents: tuple[Extent, ...]) -> array[int]:
        order, part = self._part_of.get(id(extents), (None, 0))
        if order is not None:
            order.looked_at(part)
        return super()._words(extents)
