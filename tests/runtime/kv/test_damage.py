"""Whatever happens to the files, a page is right or absent."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.planner.common.measures import ALIGN
from penstock.runtime.kv.disk.disk_pages import DiskReader
from penstock.runtime.kv.disk.page_index import INDEX
from penstock.runtime.kv.disk.page_keys import FORMAT
from penstock.runtime.kv.disk.segments import aligned
from tests.runtime.kv.pages import SHAPE, failures, flip, key_of, open_writer, put, served

RECORD = SHAPE.record_bytes
TEN = range(10)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Ten pages in segments of four: pages 4..7 are in the second."""
    with open_writer(tmp_path) as writer:
        put(writer, *TEN)
    return tmp_path


def second(store: Path) -> Path:
    return store / "segment-00000001.kv"


@pytest.mark.parametrize("offset", [0, 1, SHAPE.layer_bytes, SHAPE.payload_bytes - 1])
def test_a_flipped_bit_of_the_payload_costs_that_page(store: Path, offset: int) -> None:
    flip(second(store), RECORD + ALIGN + offset)
    lines: list[str] = []
    reader = DiskReader(store, SHAPE, warn=lines.append)
    assert served(reader, *TEN) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert failures(reader) == {"failed_checksum": 1}
    assert len(lines) == 1 and "segment-00000001.kv" in lines[0] and "checksum" in lines[0]
    assert reader.lookup([key_of(4), key_of(5)]) == 1, "dropped"
    assert reader.read(key_of(5), aligned(SHAPE.payload_bytes)) is None and reader.counters()["read_absent"] == 1
    assert failures(reader) == {"failed_checksum": 1}


def test_damage_that_comes_after_the_header_was_read_is_seen(store: Path) -> None:
    reader = DiskReader(store, SHAPE, warn=lambda line: None)
    assert served(reader, 5) == [5]
    flip(second(store), RECORD + ALIGN + 7)
    assert served(reader, 5) == []


@pytest.mark.parametrize("offset", [0, 9, 40, 60, 130, ALIGN - 1])
def test_a_flipped_bit_of_a_header_costs_that_page_with_and_without_the_index(store: Path, offset: int) -> None:
    flip(second(store), RECORD + offset)
    rest = [0, 1, 2, 3, 4, 6, 7, 8, 9]
    reader = DiskReader(store, SHAPE, warn=lambda line: None)
    assert served(reader, *TEN) == rest
    assert failures(reader) == {"failed_header": 1}
    (store / INDEX).unlink()
    assert served(DiskReader(store, SHAPE, warn=lambda line: None), *TEN) == rest


def test_a_first_header_that_is_damaged_does_not_hide_its_segment(store: Path) -> None:
    flip(second(store), 3)
    (store / INDEX).unlink()
    assert served(DiskReader(store, SHAPE, warn=lambda line: None), *TEN) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_every_damaged_index_is_made_anew(store: Path) -> None:
    sound = (store / INDEX).read_bytes()
    damaged = [sound[:-1], sound[: len(sound) // 2], b"", sound + b"x", bytes(len(sound)), b"x" * 5]
    damaged += [bytes([*sound[:i], sound[i] ^ 16, *sound[i + 1 :]]) for i in range(0, len(sound), 7)]
    for data in damaged:
        (store / INDEX).write_bytes(data)
        lines: list[str] = []
        reader = DiskReader(store, SHAPE, warn=lines.append)
        assert reader.lookup([key_of(i) for i in TEN]) == 10
        assert reader.counters()["index_rebuilt"] == 1 and len(lines) == 1
    (store / INDEX).write_bytes(b"")
    with open_writer(store, warn=lambda line: None):
        pass
    assert (store / INDEX).read_bytes() == sound, "the writer saves what it found"


def test_a_store_of_another_format_is_told_of_and_left_until_a_writer_comes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("page_record", "page_index"):
        monkeypatch.setattr(f"penstock.runtime.kv.disk.{module}.FORMAT", FORMAT + 1)
    lines: list[str] = []
    reads: list[int] = []

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        return os.preadv(fd, views, offset)

    reader = DiskReader(store, SHAPE, warn=lines.append, preadv=preadv)
    assert served(reader, *TEN) == [] and reads == [0, 0, 0], "the first header of each segment is enough"
    assert len(lines) == 1 and f"format {FORMAT}, this is format {FORMAT + 1}" in lines[0]
    with open_writer(store, warn=lambda line: None) as writer:
        assert not list(store.glob("segment-*")) and put(writer, 3) == [True]
        assert served(writer, *TEN) == [3]


def test_a_missing_index_is_made_anew_but_a_new_directory_is_no_trouble(store: Path, tmp_path: Path) -> None:
    (store / INDEX).unlink()
    lines: list[str] = []
    with open_writer(store, warn=lines.append) as writer:
        assert writer.counters()["index_rebuilt"] == 1 and "missing" in lines[0]
        assert served(writer, *TEN) == list(TEN)
    with open_writer(tmp_path / "new", warn=lines.append) as writer:
        assert writer.counters()["index_rebuilt"] == 0
    assert len(lines) == 1


def test_an_old_index_is_completed_from_the_headers(store: Path) -> None:
    old = (store / INDEX).read_bytes()
    with open_writer(store) as writer:
        put(writer, *range(10, 17))
    (store / INDEX).write_bytes(old)
    reads = []

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        return os.preadv(fd, views, offset)

    reader = DiskReader(store, SHAPE, preadv=preadv)
    assert reader.lookup([key_of(i) for i in range(17)]) == 17
    assert len(reads) <= 7 + 2, "only headers newer than the index, and the first of each segment unknown to it"
    assert reader.counters()["index_rebuilt"] == 0
    assert served(reader, *range(17)) == list(range(17))


@pytest.mark.parametrize("keep", [0, 100, ALIGN, RECORD + ALIGN, 2 * RECORD - 1, 3 * RECORD])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_truncated_segment_costs_what_was_cut_off(store: Path, keep: int, when: str) -> None:
    reader = DiskReader(store, SHAPE, warn=lambda line: None)
    os.truncate(second(store), keep)
    if when == "before":
        reader = DiskReader(store, SHAPE, warn=lambda line: None)
    rest = [0, 1, 2, 3, *range(4, 4 + keep // RECORD), 8, 9]
    assert served(reader, *TEN) == rest
    lost = 4 - keep // RECORD
    assert failures(reader) == ({"failed_truncated": lost} if when == "after" else {})
    with open_writer(store) as writer:
        assert put(writer, *TEN) == [True] * 10
        assert served(writer, *TEN) == list(TEN)
    assert served(DiskReader(store, SHAPE), *TEN) == list(TEN)


def test_a_missing_segment_costs_its_pages_and_one_line(store: Path) -> None:
    lines: list[str] = []
    reader = DiskReader(store, SHAPE, warn=lines.append)
    second(store).unlink()
    assert served(reader, *TEN) == [0, 1, 2, 3, 8, 9]
    assert failures(reader) == {"failed_missing": 1} and len(lines) == 1
    assert served(DiskReader(store, SHAPE, warn=lines.append), *TEN) == [0, 1, 2, 3, 8, 9]
    assert len(lines) == 1, "at the next opening nothing is amiss"


def test_segments_that_were_swapped_serve_nothing(store: Path) -> None:
    (store / "segment-00000000.kv").rename(store / "aside")
    second(store).rename(store / "segment-00000000.kv")
    (store / "aside").rename(second(store))
    assert served(DiskReader(store, SHAPE, warn=lambda line: None), *TEN) == [8, 9]


@pytest.mark.parametrize("read_before", [False, True])
def test_a_record_at_another_ones_place_serves_nothing(store: Path, read_before: bool) -> None:
    reader = DiskReader(store, SHAPE, warn=lambda line: None)
    if read_before:
        assert served(reader, *TEN) == list(TEN)
    data = bytearray(second(store).read_bytes())
    data[:RECORD] = data[RECORD : 2 * RECORD]
    second(store).write_bytes(data)
    assert served(reader, *TEN) == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_a_page_of_another_key_serves_nothing_though_sound(store: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with open_writer(elsewhere) as writer:
        put(writer, *range(20, 30))
    shutil.copy(second(elsewhere), second(store))
    reader = DiskReader(store, SHAPE, warn=lambda line: None)
    assert served(reader, *range(30)) == [0, 1, 2, 3, 8, 9]
    assert failures(reader) == {"failed_header": 4}


def test_what_a_dead_writer_left_is_cut_off(store: Path) -> None:
    third = store / "segment-00000002.kv"
    with open(third, "ab") as file:
        file.write(bytes(RECORD + 100))
    with open_writer(store) as writer:
        assert third.stat().st_size == 2 * RECORD
        put(writer, 10)
        assert third.stat().st_size == 3 * RECORD
    assert served(DiskReader(store, SHAPE), *range(11)) == list(range(11))


def test_a_record_counts_only_when_all_of_it_is_there_in_whatever_order_it_came(tmp_path: Path) -> None:
    snapshots: list[Path] = []

    def backwards(fd: int, views: Sequence[memoryview], offset: int) -> int:
        pieces = [view[k : k + ALIGN] for view in views for k in range(0, len(view), ALIGN)]
        for k, piece in reversed(list(enumerate(pieces))):
            os.pwritev(fd, [piece], offset + k * ALIGN)
            snapshots.append(tmp_path / f"after-{len(snapshots)}")
            shutil.copytree(tmp_path / "kv", snapshots[-1])
        return sum(map(len, views))

    with open_writer(tmp_path / "kv", pwritev=backwards) as writer:
        put(writer, 0, 1)
    pieces = RECORD // ALIGN + 1
    assert len(snapshots) == 2 * pieces
    for n, snapshot in enumerate(snapshots):
        reader = DiskReader(snapshot, SHAPE, warn=lambda line: None)
        assert served(reader, 0, 1) == list(range((n + 1) // pieces))
        assert failures(reader) == {}


def test_a_read_error_costs_that_page(store: Path) -> None:
    broken = []

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if broken and offset == broken[0]:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(fd, views, offset)

    lines: list[str] = []
    with open_writer(store, preadv=preadv, warn=lines.append) as writer:
        broken.append(RECORD)
        assert served(writer, 4, 5, 6) == [4, 6]
        assert failures(writer) == {"failed_error": 1} and "Input/output error" in lines[0]
        broken.clear()
        assert put(writer, 5) == [True], "and it is written again"
        assert served(writer, 4, 5, 6) == [4, 5, 6]
    assert served(DiskReader(store, SHAPE), *TEN) == list(TEN)


def test_a_damaged_page_is_written_again_and_found_without_the_index(store: Path) -> None:
    flip(second(store), RECORD + ALIGN)
    with open_writer(store, warn=lambda line: None) as writer:
        assert served(writer, 5) == []
        assert put(writer, 5) == [True]
    (store / INDEX).unlink()
    assert served(DiskReader(store, SHAPE, warn=lambda line: None), *TEN) == list(TEN)


def test_trouble_of_one_kind_is_told_once(store: Path) -> None:
    for slot in range(4):
        flip(second(store), slot * RECORD + ALIGN)
    lines: list[str] = []
    reader = DiskReader(store, SHAPE, warn=lines.append)
    assert served(reader, *TEN) == [0, 1, 2, 3, 8, 9]
    assert failures(reader) == {"failed_checksum": 4} and len(lines) == 1
