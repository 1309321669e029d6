"""What a command line says about a directory and does to it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.runtime.kv.disk.disk_pages import DiskReader
from penstock.runtime.kv.disk.kept_rate import measure
from penstock.runtime.kv.disk.page_index import INDEX
from penstock.runtime.kv.disk.upkeep import clear, list_namespaces, verify
from tests.runtime.kv.pages import OTHER, SHAPE, flip, open_writer, put, served


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Six pages of one model, then two of another."""
    with open_writer(tmp_path) as writer:
        put(writer, *range(6))
    with open_writer(tmp_path, OTHER) as writer:
        put(writer, 0, 1)
    return tmp_path


def test_list_tells_what_each_model_keeps(store: Path) -> None:
    other, first = list_namespaces(store)
    assert (other.namespace, other.pages, other.tokens, other.nbytes) == (OTHER.namespace, 2, 32, 2 * OTHER.record_bytes)
    assert (first.namespace, first.pages, first.tokens, first.segments) == (SHAPE.namespace, 6, 96, 2)
    assert first.nbytes == 6 * SHAPE.record_bytes
    assert time.time() - 60 < first.used_s <= other.used_s <= time.time() + 1


def test_sound_directories_verify(store: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(store, lambda done, total: seen.append((done, total)))
    assert report.exit_status == 0 and report.index_problem is None
    assert [(s.file, s.pages, s.damaged) for s in report.segments] == [
        ("segment-00000000.kv", 4, ()),
        ("segment-00000001.kv", 2, ()),
        ("segment-00000002.kv", 2, ()),
    ]
    total = 6 * SHAPE.record_bytes + 2 * OTHER.record_bytes
    assert seen[-1] == (total, total) and len(seen) == 3


def test_verify_names_what_is_damaged(store: Path) -> None:
    flip(store / "segment-00000000.kv", SHAPE.record_bytes + ALIGN + SHAPE.layer_bytes)
    flip(store / "segment-00000000.kv", 2 * SHAPE.record_bytes + 40)
    with open(store / "segment-00000001.kv", "r+b") as file:
        file.truncate(SHAPE.record_bytes + 5)
    report = verify(store)
    assert report.exit_status == 1
    first, second, third = report.segments
    assert first.pages == 2 and second.pages == 1 and third.pages == 2
    assert first.damaged == (
        f"page at {SHAPE.record_bytes}: its checksum is wrong",
        f"page at {2 * SHAPE.record_bytes}: its header is damaged",
    )
    assert second.damaged == ("1 pages are missing, the file is too short",)
    assert third.damaged == ()


def test_verify_tells_of_a_damaged_index(store: Path) -> None:
    flip(store / INDEX, 30)
    report = verify(store)
    assert report.exit_status == 1 and "checksum" in report.index_problem
    assert sum(s.pages for s in report.segments) == 8


def test_clear_takes_one_model_or_all(store: Path) -> None:
    assert clear(store, bytes(16)) == 0
    assert clear(store, SHAPE.namespace) == 6 * SHAPE.record_bytes
    assert served(DiskReader(store, SHAPE), *range(6)) == []
    assert served(DiskReader(store, OTHER), 0, 1) == [0, 1]
    assert [use.namespace for use in list_namespaces(store)] == [OTHER.namespace]
    assert clear(store) == 2 * OTHER.record_bytes
    assert list_namespaces(store) == [] and list(store.glob("segment-*")) == []
    assert verify(store).exit_status == 0


def test_numbers_are_not_used_again_after_clear(store: Path) -> None:
    clear(store)
    with open_writer(store) as writer:
        put(writer, 0)
    assert [p.name for p in store.glob("segment-*")] == ["segment-00000003.kv"]


def test_clear_leaves_a_running_writer_alone(store: Path) -> None:
    with open_writer(store) as writer:
        with pytest.raises(UserError, match="writes there"):
            clear(store)
        assert served(writer, *range(6)) == list(range(6))


@pytest.mark.parametrize("act", [list_namespaces, verify, clear])
def test_directories_that_are_not_there_are_refused(tmp_path: Path, act) -> None:
    with pytest.raises(UserError, match="absent"):
        act(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_the_drives_rate_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    rate = measure(tmp_path, 8 << 20)
    assert rate.write_gbps > 0 and rate.read_gbps > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot be written"):
        measure(tmp_path / "absent")
