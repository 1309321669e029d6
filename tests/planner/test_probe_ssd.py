"""The SSD's part of the probe, on small files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import time

import pytest

from penstock.planner.probe import scratch_file as scratch
from penstock.planner.probe import ssd_rates as ssd
from penstock.planner.probe.best_block import next_point, sweep, table
from penstock.planner.probe.findings import CannotMeasure
from penstock.planner.probe.scratch_file import Cursor, Target, existing_files, file_system, scratch_bytes, scratch_file
from penstock.planner.probe.ssd_rates import SPREAD_BYTES, Buffers, ReadLoad, fill_scratch
from tests.cli import HANGS_S

KIB, MIB = 2**10, 2**20


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(scratch, "LEAST_BYTES", MIB)
    monkeypatch.setattr(ssd, "LEAST_BYTES", MIB)
    monkeypatch.setattr(ssd, "WRITE_BYTES", 256 * KIB)
    monkeypatch.setattr(ssd, "PATTERN_BYTES", MIB)


def test_the_scratch_file_never_shows_in_its_directory(tmp_path, small):
    with scratch_file(tmp_path) as (fd, direct):
        target, gbps = fill_scratch(fd, direct, 2 * MIB, 5.0, "scratch")
        assert list(tmp_path.iterdir()) == []
        assert target.nbytes == 2 * MIB and gbps > 0
        assert os.fstat(fd).st_nlink == 0


def test_without_nameless_files_the_scratch_file_is_unlinked_at_once(tmp_path, small, monkeypatch):
    real = os.open

    def without_tmpfile(path, flags, mode=0o777):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", without_tmpfile)
    with scratch_file(tmp_path) as (fd, _):
        assert os.fstat(fd).st_nlink == 0
        assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_refuses_direct_reads_is_read_buffered_and_says_so(tmp_path, small, monkeypatch):
    real = fcntl.fcntl

    def refusing(fd, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    with scratch_file(tmp_path) as (fd, direct):
        assert not direct
        target, _ = fill_scratch(fd, direct, 2 * MIB, 5.0, "scratch")
        assert target.how == "buffered: no O_DIRECT on this file system"
        assert ReadLoad(target, Cursor(target), Buffers(2, 64 * KIB), 64 * KIB, 2).run(0.05) > 0


def test_a_file_system_that_takes_the_flag_but_not_the_write_is_written_buffered(tmp_path, small, monkeypatch):
    real = os.pwritev

    def refusing(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refusing)
    with scratch_file(tmp_path) as (fd, direct):
        assert not direct
        assert fill_scratch(fd, direct, 2 * MIB, 5.0, "scratch")[0].nbytes == 2 * MIB


def test_a_disk_without_room_is_named_with_what_is_free_and_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "free_bytes", lambda _: 100 * MIB)
    with pytest.raises(CannotMeasure, match="no room in .*105 MB free.*needs 268 MB"):
        scratch_bytes(tmp_path, 4096 * MIB)


def test_a_scratch_file_leaves_most_of_the_free_space_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "free_bytes", lambda _: 1000 * MIB)
    assert scratch_bytes(tmp_path, 4096 * MIB) == 250 * MIB


def test_a_disk_that_fills_up_while_writing_is_measured_on_what_was_written(tmp_path, small, monkeypatch):
    real = os.pwritev

    def filling(fd, buffers, offset):
        if offset >= 1536 * KIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", filling)
    with scratch_file(tmp_path) as (fd, direct):
        target, _ = fill_scratch(fd, direct, 4 * MIB, 5.0, "scratch")
        assert MIB <= target.nbytes <= 1536 * KIB


def test_a_disk_that_is_full_at_once_says_so(tmp_path, small, monkeypatch):
    with scratch_file(tmp_path) as (fd, direct):

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "pwritev", full)
        with pytest.raises(CannotMeasure, match="No space left on device"):
            fill_scratch(fd, direct, 4 * MIB, 5.0, "scratch")


def test_a_directory_that_may_not_be_written_is_no_scratch_but_a_reason(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(CannotMeasure, match="Permission denied"), scratch_file(tmp_path):
        pass


def test_existing_files_are_read_where_they_are_whole_and_large(tmp_path, small):
    (tmp_path / "whole").write_bytes(os.urandom(2 * MIB))
    (tmp_path / "small").write_bytes(b"x" * KIB)
    with open(tmp_path / "hollow", "wb") as hollow:
        hollow.truncate(8 * MIB)
    os.sync()
    with existing_files(tmp_path) as target:
        assert [size for _, size in target.extents] == [2 * MIB]


def test_a_directory_without_large_files_cannot_be_read(tmp_path, small):
    with pytest.raises(CannotMeasure, match="no file of"), existing_files(tmp_path):
        pass


def test_the_cursor_visits_every_block_before_it_repeats_one_and_never_passes_an_end():
    target = Target(((7, 10 * 64 * KIB), (8, 5 * 64 * KIB + KIB)), True, "")
    cursor = Cursor(target, seed=1)
    for _ in range(20):
        cursor.take(64 * KIB)
    taken = [cursor.take(64 * KIB) for _ in range(15)]
    assert len(set(taken)) == 15
    assert all(at + 64 * KIB <= dict(target.extents)[fd] for fd, at in taken)


def test_a_block_larger_than_every_file_is_an_error_not_an_endless_search():
    with pytest.raises(CannotMeasure, match="no file holds a block"):
        Cursor(Target(((7, MIB),), True, "")).take(2 * MIB)


def test_a_short_read_ends_the_measurement_with_its_place(tmp_path, small, monkeypatch):
    with scratch_file(tmp_path) as (fd, direct):
        target, _ = fill_scratch(fd, direct, 2 * MIB, 5.0, "scratch")
        monkeypatch.setattr(os, "preadv", lambda *_: 17)
        with pytest.raises(OSError, match="short read: 17 of 65536"):
            ReadLoad(target, Cursor(target), Buffers(1, 64 * KIB), 64 * KIB, 1).run(0.05)


def test_the_file_system_of_a_directory_is_named(tmp_path):
    assert file_system(tmp_path) != ""


class Clock:
    """Time that passes only when something is sampled."""

    def __init__(self, left: float) -> None:
        self.left = left
        self.order: list[tuple[int, int]] = []

    def sample(self, block: int, depth: int) -> float:
        self.left -= 1.0
        self.order.append((block, depth))
        return {MIB: 1.0, 4 * MIB: 2.0}[block] + depth / 100


def run(clock: Clock):
    return sweep((MIB, 4 * MIB), (1, 2, 4), clock.sample, 1.0, lambda: clock.left, lambda: None)


def test_every_point_is_measured_once_before_any_is_repeated():
    clock = Clock(20.0)
    run(clock)
    assert len(set(clock.order[:6])) == 6


def test_the_rest_of_the_time_goes_to_the_points_near_the_best():
    clock = Clock(20.0)
    samples = run(clock)
    assert {block for block, _ in clock.order[6:]} == {4 * MIB}
    counts = [len(samples[4 * MIB, depth]) for depth in (1, 2, 4)]
    assert max(counts) - min(counts) <= 1 and clock.left <= 1.5


def test_a_point_that_looked_best_by_luck_loses_it_when_measured_again():
    samples = {(MIB, 1): [3.0], (4 * MIB, 1): [2.9, 2.9, 2.9]}
    assert next_point(samples) == (MIB, 1)
    samples[MIB, 1] += [2.0, 2.0]
    assert next_point(samples) == (4 * MIB, 1)


def test_with_no_time_left_one_point_is_still_measured():
    assert len(run(Clock(0.0))) == 1


def test_the_table_holds_the_median_of_each_point_in_order():
    assert table({(4 * MIB, 1): [3.0, 1.0, 2.0], (MIB, 2): [1.5]}) == [[MIB, 2, 1.5], [4 * MIB, 1, 2.0]]


def test_a_table_of_rates_is_made_monotone_without_moving_what_already_is() -> None:
    from penstock.planner.probe.best_block import monotone, pool_violators

    assert pool_violators([1.0, 3.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0]) == [1.0, 2.5, 2.5, 4.0]
    rising = {(1, 1): 1.0, (1, 2): 2.0, (4, 1): 1.5, (4, 2): 3.0}
    assert monotone(rising, dict.fromkeys(rising, 1.0)) == rising
    lucky = {(1, 1): 1.0, (1, 16): 1.8, (4, 1): 1.1, (4, 16): 1.4}
    smooth = monotone(lucky, dict.fromkeys(lucky, 1.0))
    assert smooth[1, 16] == smooth[4, 16] == pytest.approx(1.6)


def test_reads_land_all_over_the_buffers_and_never_in_anothers() -> None:
    buffers = Buffers(3, 64 * KIB)
    starts = [{ctypes.addressof(ctypes.c_char.from_buffer(buffers.view(index, 64 * KIB))) for _ in range(6000)} for index in range(3)]
    assert not starts[0] & starts[1] and not starts[1] & starts[2] and not starts[0] & starts[2]
    assert all(len(places) * 64 * KIB > SPREAD_BYTES // 3 - 64 * KIB for places in starts)
    every = sorted(set().union(*starts))
    assert all(b - a >= 64 * KIB and a % 4096 == 0 for a, b in zip(every, every[1:], strict=False))


def test_reads_land_all_over_the_memory_that_is_given_and_beside_it_when_it_is_too_small() -> None:
    memory = mmap.mmap(-1, 3 * MIB + 4096)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def places(block_bytes: int) -> list[set[int]]:
        buffers = Buffers(2, block_bytes, memory)
        views = [[buffers.view(index, block_bytes) for _ in range(24)] for index in range(2)]
        return [{ctypes.addressof(ctypes.c_char.from_buffer(view)) - first for view in lane} for lane in views]

    low, high = places(256 * KIB)
    assert low == {at * 256 * KIB for at in range(6)} and high == {at + 3 * MIB // 2 for at in low}
    inside = range(len(memory))
    assert not any(at in inside for lane in places(2 * MIB) for at in lane)


@pytest.mark.parametrize("direct, memory, again", [(True, False, True), (False, True, True), (False, False, False)])
def test_a_file_is_read_twice_only_where_no_cache_has_kept_it(tmp_path, direct, memory, again) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    with open(path, "rb") as file:
        target = Target(((file.fileno(), MIB),), direct, "", memory)
        load = ReadLoad(target, Cursor(target), Buffers(1, 64 * KIB), 64 * KIB, 1)
        with load:
            end = time.monotonic() + HANGS_S
            while load.going() and len(load._done) <= 16 and time.monotonic() < end:
                time.sleep(0.001)
        assert (len(load._done) > 16) == again


def test_a_file_in_memory_is_known_by_its_file_system(tmp_path, monkeypatch, small) -> None:
    (tmp_path / "whole").write_bytes(os.urandom(2 * MIB))
    os.sync()
    for kind, memory in (("tmpfs", True), ("ext4", False)):
        for module in (scratch, ssd):
            monkeypatch.setattr(module, "file_system", lambda _, kind=kind: kind)
        with existing_files(tmp_path) as target, scratch_file(tmp_path) as (fd, direct):
            assert target.memory == memory == fill_scratch(fd, direct, 2 * MIB, 5.0, "scratch")[0].memory
