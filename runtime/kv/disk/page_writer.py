"""The one process that adds pages to a directory, from a thread of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
from dataclasses import dataclass
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN, show_bytes
from penstock.runtime.kv.disk.disk_pages import DiskPages, Done, Warn, page_aligned, to_stderr
from penstock.runtime.kv.disk.page_index import Segment, save
from penstock.runtime.kv.disk.page_record import Header, PageShape
from penstock.runtime.kv.disk.segments import SegmentFiles, Transfer, aligned
from penstock.runtime.kv.disk.writer_lock import WriterLock

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class _Page:
    key: bytes
    parent: bytes
    payload: memoryview
    checksum: int
    done: Done


class DiskWriter(DiskPages):
    """Pages of ``shape`` in ``directory``, which is made (for this user alone) when it is not there.

    The segments take at most ``limit_bytes``; this writer fills up to ``segment_bytes`` of one at a time. Beyond the limit whole segments
    go, those whose last read or write is longest ago, other models' pages included.

    One writer a directory: UserError naming the other one. UserError also when the directory cannot be made or written, and when the
    limit does not hold two segments or a segment not one page. DRAM: ``queue_pages`` references, no copies. ``warn`` as for
    ``DiskReader``; ``preadv`` and ``pwritev`` are the operating system's, or a test's own.
    """

    def __init__(
        self,
        directory: Path,
        shape: PageShape,
        limit_bytes: int,
        segment_bytes: int = 256 << 20,
        queue_pages: int = 16,
        warn: Warn = to_stderr,
        preadv: Transfer = os.preadv,
        pwritev: Transfer = os.pwritev,
    ):
        if segment_bytes < shape.record_bytes:
            raise UserError(f"segment_bytes={segment_bytes}: one page takes {shape.record_bytes}; take larger segments or smaller pages")
        if limit_bytes < 2 * segment_bytes:
            raise UserError(f"limit_bytes={limit_bytes}: two segments of {segment_bytes} are needed; raise it or take smaller segments")
        self.limit_bytes = limit_bytes
        self._segment_bytes = segment_bytes
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{directory}: cannot be made ({error.strerror}); name a directory that this user may write to") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise UserError(f"{directory}: cannot be written (no permission); name a directory that this user may write to")
        self._writer_lock = WriterLock(directory, "set kv.read_only=true to read beside it, or name another directory")
        try:
            super().__init__(SegmentFiles(directory, preadv, pwritev), shape, warn)
            self._remove_unreadable()
            self._active = self._resumed()
            self._make_room(0)
            self._publish()
        except BaseException as error:
            self._writer_lock.release()
            if isinstance(error, OSError):
                raise UserError(f"{directory}: cannot be written ({error.strerror}); name another directory") from error
            raise
        self._header, self._blank = aligned(ALIGN), aligned(ALIGN)
        self._queue: queue.Queue[_Page | None] = queue.Queue(queue_pages)
        self._hurried = threading.Event()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="kv-disk", daemon=True)
        self._thread.start()

    def put(self, key: bytes, parent: bytes, payload: memoryview, checksum: int, done: Done) -> bool:
        """Queue a page (aligned, all layers) with its ``checksum_of``. The checksum is not computed again, so a payload that changed since
        shows when it is read. False when the queue is full or closed: the page is skipped.

        When True, ``payload`` must not change until ``done(stored)`` is called, once, from the writer's thread. ``done`` must return
        quickly and not raise. ``stored`` is True also for a page that was there already. ValueError for a payload that is not a page.
        """
        flat = page_aligned(payload)
        if len(flat) != self.shape.payload_bytes:
            raise ValueError(f"a payload of {len(flat)} bytes, a page has {self.shape.payload_bytes}")
        with self._closing:
            if not self._closed:
                with contextlib.suppress(queue.Full):
                    self._queue.put_nowait(_Page(key, parent, flat, checksum, done))
                    return True
        self._tally.add(skipped_queue_full=1)
        return False

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until every page that is queued was written or given up, and its ``done`` called; so many seconds at most -> whether."""
        waiting = self._queue
        with waiting.all_tasks_done:
            return waiting.all_tasks_done.wait_for(lambda: not waiting.unfinished_tasks, seconds)

    def hurry(self) -> None:
        """What is queued is skipped until the queue is empty, so that this returns when the page that is being written is."""
        self._hurried.set()
        self._queue.join()
        self._hurried.clear()

    def close(self) -> None:
        """Write what is queued, save the index, let another writer in. A second call does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._publish()
        self._note_all()
        self._writer_lock.release()

    def __enter__(self) -> DiskWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while (page := self._queue.get()) is not None:
            stored = self._store_or_skip(page)
            try:
                page.done(stored)
            except Exception as error:  # the caller's mistake must not end the thread, which others wait for
                self._tally.trouble("broken_callbacks", f"{self.directory}: a callback failed ({error!r})")
            del page
            self._queue.task_done()
        self._queue.task_done()

    def _store_or_skip(self, page: _Page) -> bool:
        if self._hurried.is_set():
            self._tally.add(skipped_late=1)
            return False
        try:
            return self._store(page)
        except OSError as error:
            full = error.errno in _FULL
            counter = "skipped_disk_full" if full else "skipped_write_error"
            remedy = "free space on the disk, or lower the limit" if full else "check the disk"
            self._tally.trouble(counter, f"{self.directory}: a page was not kept ({error}); {remedy}")
            self._abandon(full)
            return False

    def _store(self, page: _Page) -> bool:
        if page.key in self._index.places:
            self._tally.add(already_there=1)
            return True
        self._make_room(self.shape.record_bytes)
        try:
            self._append(page)
        except OSError as error:
            if error.errno not in _FULL or not self._evict(self.shape.record_bytes):
                raise
            self._append(page)
        self._tally.add(written=1, written_bytes=self.shape.record_bytes)
        return True

    def _append(self, page: _Page) -> None:
        segment = self._active or self._new_segment()
        slot = segment.slots
        offset = slot * self.shape.record_bytes
        # the header comes last: a process that is killed between both writes leaves a blank one, and no page half valid
        self._files.write(segment.number, [self._blank, page.payload], offset)
        Header(self.shape, segment.number, slot, page.key, page.parent, page.checksum).encode(self._header)
        self._files.write(segment.number, [self._header], offset)
        with self._lock:
            self._index.add(segment, slot, page.key)
            self._index.use(segment)
        if segment.nbytes + self.shape.record_bytes > self._segment_bytes:
            self._finish_segment()

    def _finish_segment(self) -> None:
        self._publish()
        self._active = None

    def _new_segment(self) -> Segment:
        number = self._index.next_number
        self._files.create(number)
        self._active = segment = Segment(number, self.shape)
        with self._lock:
            self._index.adopt(segment)
            self._index.use(segment)
        return segment

    def _abandon(self, full: bool) -> None:
        """After a failed write: take back what it left, and after anything but a full disk go on in another file."""
        if self._active is not None:
            with contextlib.suppress(OSError):
                self._files.cut(self._active.number, self._active.nbytes)
            if not full and self._active.slots:
                self._finish_segment()

    def _make_room(self, nbytes: int) -> None:
        with self._lock:
            excess = self._index.nbytes + nbytes - self.limit_bytes
        if excess > 0:
            self._evict(excess)

    def _evict(self, nbytes: int) -> bool:
        """Remove least recently used segments until ``nbytes`` are free. False when there are not enough. OSError."""
        freed = 0
        # other processes' readers note their use in a file's time
        times = {number: stat.st_mtime_ns for number, stat in self._files.found().items()}
        with self._lock:
            self._index.used_elsewhere(times)
        while freed < nbytes:
            with self._lock:
                segment = self._index.least_used(keep=self._active)
                if segment is None:
                    return False
                self._index.forget(segment)  # before its file goes, so that nobody here looks for it
            self._files.remove(segment.number)
            freed += segment.nbytes
            self._tally.add(evicted_segments=1, evicted=len(segment.pages))
        return True

    def _resumed(self) -> Segment | None:
        """The newest segment of our shape that has room; a half-written record at its end is cut off."""
        record_bytes = self.shape.record_bytes
        for segment in sorted(self._index.segments.values(), key=lambda s: -s.number):
            used = segment.slots * record_bytes
            if segment.shape == self.shape and segment.nbytes >= used and used + record_bytes <= self._segment_bytes:
                if segment.nbytes > used:
                    self._files.cut(segment.number, used)
                    segment.nbytes = used
                return segment
        return None

    def _remove_unreadable(self) -> None:
        """Segments without one page that can be read only take space: a writer died at its first page, or they are of another format."""
        for number in self._files.found().keys() - self._index.segments.keys():
            self._files.remove(number)

    def _publish(self) -> None:
        """Save the index, once what it names is on the drive."""
        with self._lock:
            data = self._index.encode()
        try:
            if self._active is not None:
                self._files.sync(self._active.number)
            save(self.directory, data)
        except OSError as error:
            line = (
                f"{self.directory}: the index of {show_bytes(len(data))} was not saved ({error.strerror}); the next run reads the headers"
            )
            self._tally.trouble("index_unwritten", line)
