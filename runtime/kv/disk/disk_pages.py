"""The L3 tier of the KV prefix cache: pages of KV in a directory on an SSD, checked on every read.

``DiskReader`` and ``DiskWriter`` (in ``writer.py``) are what a run opens; ``upkeep.py`` is what a command line calls. Nothing that the
disk does raises during a run: pages are absent, counted, and ``warn`` gets the first of each trouble.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.runtime.kv.disk.counters import Tally
from penstock.runtime.kv.disk.page_fetch import Damaged, fetch
from penstock.runtime.kv.disk.page_index import Index, Place, load
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.disk.segments import SegmentFiles, Transfer

_NOTE_NS = 1_000_000_000
"""A segment's last use is noted in its file no more often than this."""

_GONE = (errno.ENOENT, errno.ESTALE)
"""What reading from a file that was removed fails with; the second on NFS, when that was another host."""

Warn = Callable[[str], None]
Done = Callable[[bool], None]


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class DiskPages:
    """What readers and the writer share. Thread-safe."""

    def __init__(self, files: SegmentFiles, shape: PageShape, warn: Warn):
        self.shape = shape
        self._files = files
        self._tally = Tally(warn)
        self._lock = threading.Lock()
        self._index = self._load()

    @property
    def directory(self) -> Path:
        return self._files.directory

    def counters(self) -> dict[str, int]:
        """``penstock.runtime.kv.disk.counters.Counters`` as a dict, for the report."""
        return self._tally.facts()

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` are here, 0.1 microseconds each. They may be gone when they are read."""
        places = self._index.places
        for i, key in enumerate(keys):
            if key not in places:
                return i
        return len(keys)

    def read(self, key: bytes, into: memoryview) -> int | None:
        """Read a page to the front of ``into`` (page-aligned, writable) and check it -> its checksum; None, and undefined contents, where
        it is absent or no good, which the counters tell apart.

        One ``preadv``. Blocks the calling thread; call from several to keep a drive busy. A page that fails is dropped. ValueError for a
        buffer that does not fit.
        """
        target = page_aligned(into)[: self.shape.payload_bytes]
        if len(target) < self.shape.payload_bytes:
            raise ValueError(f"a buffer of {len(target)} bytes for a page of {self.shape.payload_bytes}")
        index = self._index
        place = index.places.get(key)
        if place is None:
            self._tally.add(read_absent=1)
            return None
        try:
            checksum = fetch(self._files, place, key, target)
        except OSError as error:
            if error.errno in _GONE:
                self._missing(index, place)
            else:
                self._failed(index, key, place, "failed_error", error.strerror or str(error))
            return None
        except Damaged as error:
            self._failed(index, key, place, error.counter, str(error))
            return None
        self._tally.add(read_hits=1, read_bytes=len(target))
        self._use(index, place)
        return checksum

    def put(self, key: bytes, parent: bytes, payload: memoryview, checksum: int, done: Done) -> bool:
        """See ``DiskWriter``. A reader keeps nothing: False."""
        return False

    def flush(self, seconds: float | None = None) -> bool:
        """Return when all that was ``put`` is on the disk, or after so many seconds -> whether it is."""
        return True

    def hurry(self) -> None:
        """What is still queued is skipped, and counted; a page that is being written is written."""

    def _failed(self, index: Index, key: bytes, place: Place, counter: str, reason: str) -> None:
        with self._lock:
            index.drop(key, place)
        where = f"{self._files.path(place.segment.number)}: page at {place.slot * self.shape.record_bytes}"
        self._tally.trouble(counter, f"{where} was not used, {reason}; it will be computed again")

    def _missing(self, index: Index, place: Place) -> None:
        segment = place.segment
        with self._lock:
            evicted_here = index.segments.get(segment.number) is not segment
            index.forget(segment)
        if evicted_here:
            self._tally.add(read_absent=1)
        else:
            self._tally.trouble("failed_missing", f"{self._files.path(segment.number)}: gone, removed by another process")

    def _use(self, index: Index, place: Place) -> None:
        segment = place.segment
        with self._lock:
            index.use(segment)
            note = segment.used_ns - segment.noted_ns > _NOTE_NS
            if note:
                segment.noted_ns = segment.used_ns
        if note:
            self._files.touch(segment.number, segment.used_ns)

    def _note_all(self) -> None:
        """Leave the order of last uses to later runs."""
        with self._lock:
            segments = list(self._index.segments.values())
        for segment in segments:
            if segment.noted_ns < segment.used_ns:
                segment.noted_ns = segment.used_ns
                self._files.touch(segment.number, segment.used_ns)

    def _load(self) -> Index:
        try:
            index, problem = load(self._files, self.shape)
        except OSError as error:
            raise UserError(f"{self.directory}: cannot be read ({error.strerror}); name a directory of KV pages") from error
        if problem is not None:
            self._tally.trouble("index_rebuilt", f"{self.directory}: the index was made anew from the pages' headers, {problem}")
        return index


class DiskReader(DiskPages):
    """Pages of ``shape`` in ``directory``, as they were at the last ``refresh``. Needs no lock: any number, in any process.

    UserError when the directory is not there or cannot be read. ``warn`` gets the first of each trouble, on whatever thread met it.
    ``preadv`` is ``os.preadv``, or a test's own.
    """

    def __init__(self, directory: Path, shape: PageShape, warn: Warn = to_stderr, preadv: Transfer = os.preadv):
        super().__init__(SegmentFiles(directory, preadv), shape, warn)

    def refresh(self) -> None:
        """See what was written and removed since. Costs what opening does. UserError."""
        self._note_all()
        self._index = self._load()

    def close(self) -> None:
        """Nothing is held open; leaves the order of last uses to later runs."""
        self._note_all()

    def __enter__(self) -> DiskReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def page_aligned(view: memoryview) -> memoryview:
    """``view`` as bytes. ValueError when it does not begin at a multiple of 4096."""
    flat = view.cast("B")
    if len(flat) and np.frombuffer(flat, np.uint8).__array_interface__["data"][0] % ALIGN:
        raise ValueError(f"a buffer at a multiple of {ALIGN} is needed")
    return flat
