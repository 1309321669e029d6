"""Reads land where they should, whatever the alignment, the file system and the disk do."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.runtime.reading import block_reader, python_readers
from penstock.runtime.reading.read_meter import Meter
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.store.base import Extent, StoreError
from tests.cli import HANGS_S

SIZE = 1_000_003


@pytest.fixture
def content(tmp_path: Path) -> tuple[Path, bytes]:
    data = random.Random(7).randbytes(SIZE)
    path = tmp_path / "weights file=1.bin"
    path.write_bytes(data)
    return path, data


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "BACK_OFF_S", (0.0, 0.0, 0.0))


def buffer(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("block_bytes", [ALIGN, 3 * ALIGN, 1 << 20])
def test_extents_land_at_their_places_and_nowhere_else(content: tuple[Path, bytes], block_bytes: int, direct: bool) -> None:
    path, data = content
    extents = [
        Extent(path, 5000, 100_000, 5000 % ALIGN, owns_pages=True),
        Extent(path, 300_001, 77_777, 28 * ALIGN + 13),
        Extent(path, ALIGN, ALIGN, 50 * ALIGN, owns_pages=True),
        Extent(path, 17, 1, 60 * ALIGN + 1),
        Extent(path, 777_000, SIZE - 777_000, 100 * ALIGN + 777_000 % ALIGN, owns_pages=True),
    ]
    into = buffer(200 * ALIGN)
    with ReadPool(4, block_bytes, direct=direct) as pool:
        pool.read_now(extents, into)
    for e in extents:
        assert into[e.dest : e.dest + e.nbytes] == data[e.offset : e.offset + e.nbytes]
    assert into[28 * ALIGN : 28 * ALIGN + 13] == bytes(13)
    assert into[28 * ALIGN + 13 + 77_777 : 50 * ALIGN] == bytes(50 * ALIGN - (28 * ALIGN + 13 + 77_777))
    assert into[60 * ALIGN] == 0 and into[60 * ALIGN + 2] == 0


def test_an_extent_that_shares_its_pages_never_touches_its_neighbours(content: tuple[Path, bytes]) -> None:
    path, data = content
    into = buffer(4 * ALIGN)
    into[:] = b"\xff" * len(into)
    with ReadPool(1, 1 << 16) as pool:
        pool.read_now([Extent(path, ALIGN + 100, 200, 100)], into)
    assert into[100:300] == data[ALIGN + 100 : ALIGN + 300]
    assert into[:100] == b"\xff" * 100 and into[300:] == b"\xff" * (4 * ALIGN - 300)


@pytest.mark.parametrize("block_bytes", [ALIGN, 2 * ALIGN, 3 * ALIGN, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 4095, 5 * ALIGN + 77])
@pytest.mark.parametrize("nbytes", [2 * ALIGN, 2 * ALIGN + 1, 7 * ALIGN - 77, 9 * ALIGN])
def test_a_shared_page_at_an_edge_is_copied_and_its_other_bytes_stay(
    content: tuple[Path, bytes], offset: int, nbytes: int, block_bytes: int
) -> None:
    path, data = content

    def preadv(fd: int, views: Sequence[memoryview], at: int) -> int:
        return os.preadv(fd, views[:2], at)

    dest = 2 * ALIGN + offset % ALIGN
    into = buffer(16 * ALIGN)
    into[:] = b"\xff" * len(into)
    with ReadPool(2, block_bytes, staging=buffer(4 * ALIGN), preadv=preadv) as pool:
        pool.read_now([Extent(path, offset, nbytes, dest)], into)
    assert into[dest : dest + nbytes] == data[offset : offset + nbytes]
    assert into[:dest] == b"\xff" * dest and into[dest + nbytes :] == b"\xff" * (len(into) - dest - nbytes)


def test_a_buffer_that_is_not_page_aligned_is_filled_through_staging(content: tuple[Path, bytes]) -> None:
    path, data = content
    whole = buffer(10 * ALIGN)
    with ReadPool(2, 1 << 14) as pool:
        pool.read_now([Extent(path, 0, 8 * ALIGN, 0, owns_pages=True)], whole[100:])
    assert whole[100 : 100 + 8 * ALIGN] == data[: 8 * ALIGN]


def test_given_staging_is_used_and_too_little_of_it_is_refused(content: tuple[Path, bytes]) -> None:
    path, data = content
    into = buffer(30 * ALIGN)
    with ReadPool(2, 1 << 20, staging=buffer(4 * ALIGN)) as pool:
        pool.read_now([Extent(path, 33, 100_000, 1)], into)
    assert into[1:100_001] == data[33:100_033]
    with pytest.raises(UserError, match="staging_bytes=4096: 2 threads need at least 8192"):
        ReadPool(2, 1 << 20, staging=buffer(ALIGN))


def test_many_reads_at_once_each_finish_once(content: tuple[Path, bytes]) -> None:
    path, data = content
    count = 200
    buffers = [buffer(4 * ALIGN) for _ in range(count)]
    calls: list[tuple[int, BaseException | None]] = []
    finished = threading.Semaphore(0)

    def done_for(i: int):
        def done(error: BaseException | None) -> None:
            calls.append((i, error))
            finished.release()

        return done

    with ReadPool(5, ALIGN) as pool:
        for i in range(count):
            pool.read([Extent(path, i * 1000, 3 * ALIGN, 7)], buffers[i], done_for(i))
        for _ in range(count):
            assert finished.acquire(timeout=HANGS_S)
    assert sorted(i for i, _ in calls) == list(range(count)) and all(error is None for _, error in calls)
    assert all(b[7 : 7 + 3 * ALIGN] == data[i * 1000 : i * 1000 + 3 * ALIGN] for i, b in enumerate(buffers))


def test_reads_start_in_the_order_they_were_asked_for(content: tuple[Path, bytes]) -> None:
    path, _ = content
    offsets: list[int] = []

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        offsets.append(offset)
        return os.preadv(fd, views, offset)

    into = [buffer(8 * ALIGN) for _ in range(2)]
    last = threading.Event()
    with ReadPool(1, 2 * ALIGN, preadv=preadv) as pool:
        pool.read([Extent(path, 0, 8 * ALIGN, 0, True)], into[0], lambda error: None)
        pool.read([Extent(path, 20 * ALIGN, 4 * ALIGN, 0, True)], into[1], lambda error: last.set())
        assert last.wait(30)
    assert offsets == [0, 2 * ALIGN, 4 * ALIGN, 6 * ALIGN, 20 * ALIGN, 22 * ALIGN]


def test_urgent_reads_go_before_those_that_have_not_begun(content: tuple[Path, bytes]) -> None:
    path, _ = content
    began, hold, offsets = threading.Event(), threading.Event(), []

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        offsets.append(offset)
        began.set()
        hold.wait()
        return os.preadv(fd, views, offset)

    with ReadPool(1, ALIGN, preadv=preadv) as pool:
        pool.read([Extent(path, 0, 3 * ALIGN, 0, owns_pages=True)], buffer(3 * ALIGN), lambda error: None)
        assert began.wait(5)
        pool.read([Extent(path, 8 * ALIGN, 2 * ALIGN, 0, owns_pages=True)], buffer(2 * ALIGN), lambda error: None, urgent=True)
        hold.set()
        pool.read_now([Extent(path, 5 * ALIGN, ALIGN, 0, owns_pages=True)], buffer(ALIGN))
    assert [offset // ALIGN for offset in offsets] == [0, 8, 9, 1, 2, 5]


def test_whoever_waits_until_reads_have_begun_goes_on_with_as_many_in_flight_as_there_are_threads(
    content: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block wakes one thread."""
    path, _ = content
    monkeypatch.setattr(python_readers, "BEGUN_S", HANGS_S)
    under_way, hold, ended = threading.Semaphore(0), threading.Event(), threading.Event()

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        under_way.release()
        assert hold.wait(HANGS_S)
        return os.preadv(fd, views, offset)

    with ReadPool(3, ALIGN, preadv=preadv) as pool:
        since = time.perf_counter()
        pool.begun()
        pool.read([Extent(path, 0, ALIGN, 0, True)], buffer(ALIGN), lambda error: None, urgent=True)
        assert under_way.acquire(timeout=HANGS_S) and pool._readers._awake == 1
        pool.read([Extent(path, 0, 8 * ALIGN, 0, True)], buffer(8 * ALIGN), lambda error: ended.set(), urgent=True)
        pool.begun()
        assert pool._readers._busy == 3 and time.perf_counter() - since < HANGS_S / 2
        hold.set()
        assert ended.wait(HANGS_S)


@pytest.mark.parametrize("owns_pages", [True, False])
def test_short_reads_go_on_where_they_stopped(content: tuple[Path, bytes], owns_pages: bool) -> None:
    path, data = content

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, [views[0][: max(ALIGN, len(views[0]) // 3 // ALIGN * ALIGN)]], offset)

    into = buffer(64 * ALIGN)
    with ReadPool(2, 16 * ALIGN, preadv=preadv) as pool:
        pool.read_now([Extent(path, 100, 60 * ALIGN, 100, owns_pages)], into)
        assert pool.meter.retries == 0
    assert into[100 : 100 + 60 * ALIGN] == data[100 : 100 + 60 * ALIGN]


def test_a_passing_read_error_is_tried_again(content: tuple[Path, bytes]) -> None:
    path, data = content
    failures = [errno.EIO, errno.EIO, errno.EIO]

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if failures:
            raise OSError(failures.pop(), "Input/output error")
        return os.preadv(fd, views, offset)

    into = buffer(ALIGN)
    with ReadPool(1, ALIGN, preadv=preadv) as pool:
        pool.read_now([Extent(path, 0, ALIGN, 0, True)], into)
        assert pool.meter.retries == 3
    assert into == data[:ALIGN]


def test_failures_count_anew_once_a_block_has_made_progress(content: tuple[Path, bytes]) -> None:
    """Every page of the block fails as often as may be, and then comes."""
    path, data = content
    failed: dict[int, int] = {}

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if failed.setdefault(offset, 0) < len(block_reader.BACK_OFF_S):
            failed[offset] += 1
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, [views[0][:ALIGN]], offset)

    into = buffer(4 * ALIGN)
    with ReadPool(1, 4 * ALIGN, preadv=preadv) as pool:
        pool.read_now([Extent(path, 0, 4 * ALIGN, 0, True)], into)
        assert pool.meter.retries == 12
    assert into == data[: 4 * ALIGN]


def test_a_lasting_read_error_names_file_and_offset(content: tuple[Path, bytes]) -> None:
    path, _ = content

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if offset >= 8 * ALIGN:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, views, offset)

    into = buffer(32 * ALIGN)
    with ReadPool(2, 4 * ALIGN, preadv=preadv) as pool:
        with pytest.raises(StoreError, match=r"file=1\.bin: read of \d+ bytes at offset 32768 failed 4 times \(Input/output error\)"):
            pool.read_now([Extent(path, 0, 12 * ALIGN, 0, True)], into)
        pool.read_now([Extent(path, 0, 8 * ALIGN, 0, True)], into)


def test_a_file_that_ends_too_early_names_file_and_offset(content: tuple[Path, bytes]) -> None:
    path, _ = content
    into = buffer(300 * ALIGN)
    message = rf"at offset {SIZE // ALIGN * ALIGN} failed 4 times \(the file ends there\)"
    with ReadPool(2, 1 << 20) as pool, pytest.raises(StoreError, match=message):
        pool.read_now([Extent(path, 0, SIZE + 1, 0, True)], into)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with ReadPool(1, ALIGN) as pool, pytest.raises(StoreError, match="gone.bin: cannot be opened"):
        pool.read_now([Extent(tmp_path / "gone.bin", 0, 10, 0)], buffer(ALIGN))


def test_a_file_system_without_o_direct_is_read_through_the_page_cache(content: tuple[Path, bytes]) -> None:
    path, data = content

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.preadv(fd, views, offset)

    into = buffer(64 * ALIGN)
    with ReadPool(2, 4 * ALIGN, preadv=preadv) as pool:
        pool.read_now([Extent(path, 77, 30 * ALIGN, 77, True), Extent(path, 500_000, 999, 50 * ALIGN + 3)], into)
        assert pool.buffered_files == (path,) and pool.direct_files == ()
    assert into[77 : 77 + 30 * ALIGN] == data[77 : 77 + 30 * ALIGN]
    assert into[50 * ALIGN + 3 : 50 * ALIGN + 1002] == data[500_000:500_999]


def test_closing_fails_what_waits_and_waits_for_what_runs(content: tuple[Path, bytes]) -> None:
    path, _ = content
    started, go = threading.Event(), threading.Event()

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        started.set()
        go.wait(30)
        return os.preadv(fd, views, offset)

    outcomes: list[BaseException | None] = []
    pool = ReadPool(1, ALIGN, preadv=preadv)
    into = buffer(8 * ALIGN)
    pool.read([Extent(path, 0, ALIGN, 0, True)], into, outcomes.append)
    pool.read([Extent(path, 0, 4 * ALIGN, 0, True)], into, outcomes.append)
    assert started.wait(30)
    closer = threading.Thread(target=pool.close)
    closer.start()
    while not pool._readers.closed:
        pass
    go.set()
    closer.join(30)
    assert outcomes[0] is None and isinstance(outcomes[1], StoreError) and len(outcomes) == 2
    with pytest.raises(StoreError, match="closed"):
        pool.read([Extent(path, 0, ALIGN, 0, True)], into, outcomes.append)
    pool.close()


def test_an_extent_outside_its_buffer_is_a_mistake_of_the_caller(content: tuple[Path, bytes]) -> None:
    path, _ = content
    with ReadPool(1, ALIGN) as pool, pytest.raises(ValueError, match="does not fit"):
        pool.read_now([Extent(path, 0, 2 * ALIGN, 0, True)], buffer(ALIGN))


def test_busy_seconds_count_overlapping_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 10.0, 12.0, 20.0])
    monkeypatch.setattr("penstock.runtime.reading.read_meter.time.perf_counter", lambda: next(now))
    meter = Meter()
    meter.begin()
    meter.begin()
    meter.end(5)
    meter.end(7)
    meter.begin()
    assert meter.busy_seconds == 4.0 + 2.0
    assert (meter.bytes, meter.reads) == (12, 2)
