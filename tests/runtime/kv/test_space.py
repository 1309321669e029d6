"""The segments never take more than the limit, and the least used goes first."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.runtime.kv.disk.disk_pages import DiskReader
from tests.runtime.kv.nursery import Nursery
from tests.runtime.kv.pages import OTHER, SHAPE, failures, key_of, open_writer, put, served

PAGES, SEGMENT_PAGES = 9, 3


class Model:
    """What the writer is to do, in units of pages."""

    def __init__(self) -> None:
        self.segments: list[list[int]] = []  # least used first
        self.active: list[int] | None = None

    def put(self, i: int) -> None:
        if any(i in s for s in self.segments):
            return
        while sum(map(len, self.segments)) + 1 > PAGES:
            self.segments.remove(next(s for s in self.segments if s is not self.active))
        if self.active is None:
            self.active = []
            self.segments.append(self.active)
        self.active.append(i)
        self.use(self.active)
        if len(self.active) == SEGMENT_PAGES:
            self.active = None

    def read(self, i: int) -> list[int]:
        for s in self.segments:
            if i in s:
                self.use(s)
                return [i]
        return []

    def use(self, segment: list[int]) -> None:
        self.segments = [s for s in self.segments if s is not segment] + [segment]


STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "read", "reopen"]), st.integers(0, 17)), max_size=40)


READ_TWICE = [*(("put", i) for i in range(9)), ("read", 0), ("read", 3), ("read", 6), ("read", 0), ("reopen", 0), ("put", 9)]


@example(steps=READ_TWICE)
@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_eviction_follows_the_model_over_restarts(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]) -> None:
    directory = tmp_path_factory.mktemp("kv")
    model = Model()
    writer = open_writer(directory, pages=PAGES, segment_pages=SEGMENT_PAGES)
    try:
        for act, i in steps:
            if act == "put":
                model.put(i)
                assert put(writer, i) == [True]
            elif act == "read":
                assert served(writer, i) == model.read(i)
            else:
                writer.close()
                writer = open_writer(directory, pages=PAGES, segment_pages=SEGMENT_PAGES)
            kept = {i for s in model.segments for i in s}
            assert {i for i in range(18) if writer.lookup([key_of(i)])} == kept
            assert sum(p.stat().st_size for p in directory.glob("segment-*")) == len(kept) * SHAPE.record_bytes <= writer.limit_bytes
        assert failures(writer) == {}
    finally:
        writer.close()


def test_a_lower_limit_takes_effect_when_it_is_opened(tmp_path: Path) -> None:
    with open_writer(tmp_path, pages=40) as writer:
        put(writer, *range(20))
    with open_writer(tmp_path, pages=8) as writer:
        assert served(writer, *range(20)) == list(range(12, 20))
        assert writer.counters() | {"evicted_segments": 3, "evicted": 12} == writer.counters()


def test_another_models_segments_count_and_go_when_they_are_the_least_used(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        put(writer, *range(8))
    limit = 8 * SHAPE.record_bytes
    with open_writer(tmp_path, OTHER, pages=limit // OTHER.record_bytes, segment_pages=2) as writer:
        put(writer, 0)
        assert sum(p.stat().st_size for p in tmp_path.glob("segment-*")) <= limit
    assert served(DiskReader(tmp_path, SHAPE), *range(8)) == [4, 5, 6, 7]
    assert served(DiskReader(tmp_path, OTHER), 0) == [0]


def test_what_another_process_reads_is_kept(tmp_path: Path) -> None:
    with open_writer(tmp_path, pages=9, segment_pages=3) as writer:
        put(writer, *range(9))
        with DiskReader(tmp_path, SHAPE) as reader:
            assert served(reader, 0) == [0]
        put(writer, 9)
        assert served(writer, *range(10)) == [0, 1, 2, 6, 7, 8, 9]


class FullDisk:
    """``pwritev`` on a disk that holds ``nbytes`` in a directory's segments."""

    def __init__(self, directory: Path, nbytes: int, error: int = errno.ENOSPC):
        self.directory = directory
        self.nbytes = nbytes
        self.error = error

    def __call__(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        grown = max(0, offset + sum(map(len, views)) - os.fstat(fd).st_size)
        if sum(p.stat().st_size for p in self.directory.glob("segment-*")) + grown > self.nbytes:
            os.pwritev(fd, [views[0]], offset)  # a part still fits
            raise OSError(self.error, os.strerror(self.error))
        return os.pwritev(fd, views, offset)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_evicts_and_goes_on(tmp_path: Path, error: int) -> None:
    lines: list[str] = []
    disk = FullDisk(tmp_path, 6 * SHAPE.record_bytes, error)
    with open_writer(tmp_path, segment_pages=2, pwritev=disk, warn=lines.append) as writer:
        assert put(writer, *range(10)) == [True] * 10
        assert served(writer, *range(10)) == list(range(4, 10))
        assert writer.counters()["evicted_segments"] == 2
    assert served(DiskReader(tmp_path, SHAPE), *range(10)) == list(range(4, 10))
    assert lines == []


def test_a_disk_that_others_filled_costs_the_pages_until_there_is_room(tmp_path: Path) -> None:
    lines: list[str] = []
    disk = FullDisk(tmp_path, 0)
    with open_writer(tmp_path, pwritev=disk, warn=lines.append) as writer:
        assert put(writer, 0, 1) == [False, False]
        assert writer.counters()["skipped_disk_full"] == 2
        assert len(lines) == 1 and "No space left" in lines[0]
        assert sum(p.stat().st_size for p in tmp_path.glob("segment-*")) == 0
        disk.nbytes = 10 * SHAPE.record_bytes
        assert put(writer, 0, 2) == [True, True]
        assert served(writer, 0, 1, 2) == [0, 2]
    assert served(DiskReader(tmp_path, SHAPE), 0, 1, 2) == [0, 2]


def test_any_other_write_error_costs_that_page_and_the_segment_is_left(tmp_path: Path) -> None:
    failing: list[bool] = []

    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if failing:
            failing.clear()
            os.pwritev(fd, [views[0]], offset)
            raise OSError(errno.EIO, "Input/output error")
        return os.pwritev(fd, views, offset)

    with open_writer(tmp_path, pwritev=pwritev, warn=lambda line: None) as writer:
        put(writer, 0)
        failing.append(True)
        assert put(writer, 1, 2) == [False, True]
        assert writer.counters()["skipped_write_error"] == 1
        assert served(writer, 0, 1, 2) == [0, 2]
    assert [p.stat().st_size for p in sorted(tmp_path.glob("segment-*"))] == [SHAPE.record_bytes] * 2


def test_a_header_that_cannot_be_written_leaves_no_page(tmp_path: Path) -> None:
    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if len(views) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return os.pwritev(fd, views, offset)

    with open_writer(tmp_path, pwritev=pwritev, warn=lambda line: None) as writer:
        assert put(writer, 0) == [False]
        assert served(writer, 0) == []
        assert served(DiskReader(tmp_path, SHAPE), 0) == []


def test_an_index_that_cannot_be_saved_is_told_and_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    writer = open_writer(tmp_path, warn=lines.append)
    put(writer, *range(3))
    (tmp_path / "index.kv").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        writer.close()
    assert writer.counters()["index_unwritten"] == 1 and len(lines) == 1
    assert served(DiskReader(tmp_path, SHAPE, warn=lines.append), 0, 1, 2) == [0, 1, 2]


def test_files_may_grow_only_so_far(tmp_path: Path, nursery: Nursery) -> None:
    report = tmp_path / "report"
    pid = nursery.start("write_under_limit", directory=str(tmp_path / "kv"), file_bytes=3 * SHAPE.record_bytes + 8192, report=str(report))
    assert nursery.wait(pid) == 0
    told = json.loads(report.read_text())
    assert told["stored"] == [True, True, True, False] * 3
    assert told["counters"]["skipped_write_error"] == 3 and len(told["lines"]) == 1
    assert served(DiskReader(tmp_path / "kv", SHAPE), *range(12)) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
