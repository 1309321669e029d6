"""What lies in the page cache already: copied out by every core, ten times faster than any drive."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from penstock.planner.common.measures import ALIGN, align_down, align_up
from penstock.runtime.reading.blocks import pieces_of
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.pending import Done, Pending
from penstock.runtime.reading.read_meter import Meter
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.reading.store_errors import StoreError

PIECE_BYTES = 8 << 20
"""Most bytes of one copy: long enough that taking the interpreter's lock again costs little, short enough for all cores to share."""
_CACHESTAT = 451  # Linux 6.5; the same number on every architecture


class _Request(NamedTuple):
    """One call of ``read``."""

    into: memoryview
    name: str
    pending: Pending


class CachedReads:
    """``threads`` threads that copy what the page cache holds and hand everything else to ``pool``, which reads past it.

    The page cache is asked before anything is read: a read that would not wait starts read-ahead, which halves a cold drive's rate.
    Close it before ``pool``. Takes no DRAM of its own.
    """

    def __init__(self, pool: ReadPool, threads: int):
        self.meter = Meter()
        """Of what came from the page cache alone."""
        self._pool = pool
        self._cache = PageCache()
        self._queue: SimpleQueue[tuple[_Request, Extent] | None] = SimpleQueue()
        self._order = threading.Lock()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"cached-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def read(self, extents: Sequence[Extent], into: memoryview, done: Done, name: str = "load") -> None:
        """See :class:`penstock.runtime.reading.reader.Reads`."""
        view = into.cast("B")
        pieces = [piece for extent in extents for piece in pieces_of(extent, PIECE_BYTES)]
        if any(p.dest < 0 or p.dest + p.nbytes > len(view) for p in pieces):
            raise ValueError(f"the extents do not fit a buffer of {len(view)} bytes")
        request = _Request(view, name, Pending(len(pieces), done))
        if not pieces:
            done(None)
        with self._order:
            if self._closed:
                raise StoreError("the reader is closed; open the store again")
            for piece in pieces:
                self._queue.put((request, piece))

    def close(self) -> None:
        """Fail what is still queued, wait for copies in flight. A second call does nothing."""
        with self._order:
            self._closed = True
            threads, self._threads = self._threads, []
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            thread.join()
        self._cache.close()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            request, piece = item
            error: BaseException | None = None
            try:
                if self._closed:
                    error = StoreError(f"{piece.file}: read at offset {piece.offset} was cancelled")
                elif request.pending.error is None and not self._copy(piece, request.into):
                    self._pool.read((piece,), request.into, request.pending.finish, request.name)
                    continue
            except Exception as caught:  # handed to whoever waits for this read
                error = caught
            request.pending.finish(error)
            del request, piece, item

    def _copy(self, piece: Extent, into: memoryview) -> bool:
        self.meter.begin()
        copied = self._cache.read(piece.file, into[piece.dest : piece.dest + piece.nbytes], piece.offset)
        self.meter.end(piece.nbytes if copied else 0)
        return copied


class PageCache:
    """Reads of files that never ask the drive. Thread-safe."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fds: dict[Path, int] = {}
        self._silent: set[Path] = set()
        self._lock = threading.Lock()

    def read(self, path: Path, into: memoryview, offset: int) -> bool:
        """Fill ``into`` if every byte lies in the page cache. False leaves ``into`` undefined: it does not, or nobody can say."""
        if path in self._silent:
            return False
        try:
            fd = self._fd(path)
            return self._holds(fd, offset, len(into)) and os.preadv(fd, [into], offset, os.RWF_NOWAIT) == len(into)
        except BlockingIOError:
            return False
        except (OSError, AttributeError):  # a kernel or file system that cannot say, or no such file: the ordinary read tells
            self._silent.add(path)
            return False

    def share(self, paths: Iterable[Path]) -> float:
        """Part of the files' bytes that lies in the page cache; 0 where the kernel cannot say."""
        held = total = 0
        for path in paths:
            with contextlib.suppress(OSError, AttributeError):
                nbytes = path.stat().st_size
                held += min(nbytes, self._held(self._fd(path), 0, nbytes))
                total += nbytes
        return held / total if total else 0.0

    def close(self) -> None:
        """Nothing reads any more."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _fd(self, path: Path) -> int:
        with self._lock:
            if path not in self._fds:
                self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._fds[path]

    def _holds(self, fd: int, offset: int, nbytes: int) -> bool:
        first, last = align_down(offset), align_up(offset + nbytes)
        return self._held(fd, first, last - first) >= last - first

    def _held(self, fd: int, offset: int, nbytes: int) -> int:
        """Bytes in the page cache, in whole pages. OSError where the kernel cannot say."""
        first, last = offset, align_up(offset + nbytes)
        span = (ctypes.c_uint64 * 2)(first, last - first)
        found = (ctypes.c_uint64 * 5)()
        if self._libc.syscall(_CACHESTAT, fd, span, found, 0) != 0:
            raise OSError(ctypes.get_errno(), "cachestat")
        return found[0] * ALIGN
