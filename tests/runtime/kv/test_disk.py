"""What is written is read back, by whoever opens the directory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.runtime.kv.disk.disk_pages import DiskReader
from penstock.runtime.kv.disk.page_keys import ROOT
from penstock.runtime.kv.disk.segments import aligned
from tests.runtime.kv.pages import OTHER, SHAPE, failures, key_of, offer, open_writer, put, served


def keys(*numbers: int) -> list[bytes]:
    return [key_of(i) for i in numbers]


def test_pages_are_served_at_once_after_a_restart_and_to_readers(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        assert put(writer, *range(10)) == [True] * 10
        assert served(writer, *range(12)) == list(range(10))
        assert served(DiskReader(tmp_path, SHAPE), *range(10)) == list(range(10))
    with open_writer(tmp_path) as writer:
        assert served(writer, *range(10)) == list(range(10))
        assert put(writer, 10) == [True]
    assert served(DiskReader(tmp_path, SHAPE), *range(12)) == list(range(11))


def test_lookup_counts_leading_pages(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        put(writer, 0, 1, 3)
        assert writer.lookup(keys(0, 1, 2, 3)) == 2
        assert writer.lookup(keys(2, 0)) == 0
        assert writer.lookup(keys(0, 1, 3)) == 3
        assert writer.lookup([]) == 0


def test_a_whole_page_takes_one_read(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        put(writer, 0)
    calls = []

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        return os.preadv(fd, views, offset)

    reader = DiskReader(tmp_path, SHAPE, preadv=preadv)
    for expected in ([0], [4096]):
        calls.clear()
        assert served(reader, 0) == [0]
        assert calls == expected


def test_buffers_must_be_aligned_and_large_enough(tmp_path: Path) -> None:
    room = aligned(2 * SHAPE.payload_bytes)
    with open_writer(tmp_path) as writer:
        for view in (room[8 : SHAPE.payload_bytes + 8], room[: SHAPE.payload_bytes - 4096]):
            with pytest.raises(ValueError, match="buffer|payload"):
                writer.put(key_of(0), ROOT, view, 0, lambda stored: None)
            with pytest.raises(ValueError, match="buffer"):
                writer.read(key_of(0), view)


def test_a_page_is_written_once(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        assert put(writer, 0, 0, 1, 0) == [True] * 4
        assert writer.counters() | {"written": 2, "already_there": 2} == writer.counters()
    assert sum(p.stat().st_size for p in tmp_path.glob("segment-*")) == 2 * SHAPE.record_bytes


def test_a_full_queue_skips_pages_and_says_so(tmp_path: Path) -> None:
    gate, blocked = threading.Event(), threading.Event()

    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        blocked.set()
        gate.wait(30)
        return os.pwritev(fd, views, offset)

    results: dict[int, bool] = {}
    with open_writer(tmp_path, queue_pages=2, pwritev=pwritev) as writer:

        def taken(i: int) -> bool:
            return offer(writer, i, lambda stored: results.update({i: stored}))

        assert taken(0)
        assert blocked.wait(30)
        assert [taken(i) for i in (1, 2, 3)] == [True, True, False]
        assert results == {}, "the payload belongs to the writer until it is written"
        gate.set()
        writer.flush()
        assert results == {0: True, 1: True, 2: True}
        assert writer.counters()["skipped_queue_full"] == 1
        assert served(writer, 0, 1, 2, 3) == [0, 1, 2]


def test_what_is_queued_is_written_at_close_and_nothing_after(tmp_path: Path) -> None:
    writer = open_writer(tmp_path)
    stored: list[bool] = []
    for i in range(6):
        assert offer(writer, i, stored.append)
    writer.close()
    writer.close()
    assert stored == [True] * 6
    assert not offer(writer, 9, stored.append)
    assert served(DiskReader(tmp_path, SHAPE), *range(10)) == list(range(6))


def test_a_callback_that_raises_does_not_stop_the_writer(tmp_path: Path) -> None:
    lines: list[str] = []

    def raises(stored: bool) -> None:
        raise RuntimeError("broken")

    with open_writer(tmp_path, warn=lines.append) as writer:
        assert offer(writer, 0, raises)
        assert put(writer, 1) == [True]
        assert writer.counters()["broken_callbacks"] == 1
    assert len(lines) == 1 and "broken" in lines[0]


def test_another_models_pages_are_never_met(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        put(writer, 0, 1)
    with open_writer(tmp_path, OTHER) as writer:
        assert writer.lookup(keys(0, 1)) == 0
        assert writer.read(key_of(0), aligned(OTHER.payload_bytes)) is None
        assert writer.counters()["read_absent"] == 1
        assert put(writer, 1, 2) == [True, True]
        assert served(writer, 0, 1, 2) == [1, 2]
    assert served(DiskReader(tmp_path, SHAPE), 0, 1, 2) == [0, 1]
    assert served(DiskReader(tmp_path, OTHER), 0, 1, 2) == [1, 2]


def test_readers_see_what_was_published_and_more_after_refresh(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        put(writer, 0)
        with DiskReader(tmp_path, SHAPE) as reader:
            put(writer, *range(1, 7))
            assert served(reader, 0, 1, 5) == [0]
            reader.refresh()
            assert served(reader, *range(8)) == list(range(7))
            assert failures(reader) == {}


def test_threads_read_at_the_same_time(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        put(writer, *range(20))
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda start: served(writer, *range(start, 20, 4), *range(20)), range(4)))
        assert [len(r) for r in results] == [25] * 4
        assert writer.counters()["read_hits"] == 100
        assert writer.counters()["read_bytes"] == 100 * SHAPE.payload_bytes


@pytest.mark.parametrize("where", ["open", "transfer"])
def test_file_systems_without_o_direct_are_used_through_the_page_cache(tmp_path: Path, monkeypatch, where: str) -> None:
    real_open, refused = os.open, []

    def refuses(path: object, flags: int, *mode: int, **rest: object) -> int:
        if flags & os.O_DIRECT and str(path).endswith(".kv"):
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode, **rest)

    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        import fcntl

        if where == "transfer" and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.pwritev(fd, views, offset)

    if where == "open":
        monkeypatch.setattr(os, "open", refuses)
    with open_writer(tmp_path, pwritev=pwritev) as writer:
        assert put(writer, *range(6)) == [True] * 6
        assert served(writer, *range(6)) == list(range(6))
        assert writer.counters()["skipped_write_error"] == 0
    assert len(refused) == 1, "asked once"


@pytest.mark.parametrize("reported", [4096, 5000])
def test_short_transfers_are_continued_where_o_direct_can(tmp_path: Path, reported: int) -> None:
    def slowly(call):
        def some(fd: int, views: Sequence[memoryview], offset: int) -> int:
            assert offset % 4096 == 0
            return min(call(fd, [views[0][:8192]], offset), reported)

        return some

    with open_writer(tmp_path, pwritev=slowly(os.pwritev), preadv=slowly(os.preadv)) as writer:
        assert put(writer, 0, 1) == [True, True]
        assert served(writer, 0, 1) == [0, 1]


def test_directories_that_cannot_be_used_are_refused_at_open(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for directory in (file, file / "below"):
        with pytest.raises(UserError, match="name a directory"):
            open_writer(directory)
        with pytest.raises(UserError, match="cannot be read"):
            DiskReader(directory, SHAPE)
    with pytest.raises(UserError, match="cannot be read"):
        DiskReader(tmp_path / "absent", SHAPE)
    with open_writer(tmp_path / "new" / "deep") as writer:
        assert put(writer, 0) == [True]
    assert (tmp_path / "new" / "deep").stat().st_mode & 0o777 == 0o700, "prompts can be told from KV"


@pytest.mark.parametrize(("pages", "segment_pages"), [(7, 4), (8, 0)])
def test_limits_too_small_for_two_segments_or_one_page_are_refused(tmp_path: Path, pages: int, segment_pages: int) -> None:
    with pytest.raises(UserError, match="limit_bytes|segment_bytes"):
        open_writer(tmp_path, pages=pages, segment_pages=segment_pages)
