"""Writers die at any moment; what they leave is right or absent."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path

from penstock.runtime.kv.disk.disk_pages import DiskReader
from penstock.runtime.kv.disk.upkeep import verify
from tests.runtime.kv.nursery import Nursery
from tests.runtime.kv.pages import SHAPE, failures, key_of, open_writer, put, served

UNIVERSE = 40
"""More pages than the limit holds, so that a writer never finishes."""
SIZES = {"pages": 18, "segment_pages": 5}


def last_write_ns(directory: Path) -> int:
    times = [0]
    for path in directory.glob("segment-*"):
        with contextlib.suppress(FileNotFoundError):
            times.append(path.stat().st_mtime_ns)
    return max(times)


def wait_for_write(directory: Path, since_ns: int) -> None:
    deadline = time.monotonic() + 30
    while last_write_ns(directory) <= since_ns:
        assert time.monotonic() < deadline, "the writer does not write"
        time.sleep(0.001)


def test_200_kills_leave_every_page_right_or_absent(tmp_path: Path, nursery: Nursery) -> None:
    chance = random.Random(3)
    start = grew = 0
    before: set[int] = set()
    for n in range(200):
        since_ns = last_write_ns(tmp_path)
        pid = nursery.start("write_forever", directory=str(tmp_path), start=start, universe=UNIVERSE, **SIZES)
        if n % 4:  # else it may be killed while it opens
            wait_for_write(tmp_path, since_ns)
        time.sleep(chance.uniform(0, 0.02))
        nursery.kill(pid)
        reader = DiskReader(tmp_path, SHAPE, warn=lambda line: None)
        found = served(reader, *range(UNIVERSE))
        assert failures(reader) == {}, "a torn record is no page"
        assert {i for i in range(UNIVERSE) if reader.lookup([key_of(i)])} == set(found)
        assert sum(p.stat().st_size for p in tmp_path.glob("segment-*")) <= SIZES["pages"] * SHAPE.record_bytes
        grew += set(found) != before
        before = set(found)
        start = chance.randrange(UNIVERSE)
    assert grew > 20, "the writers hardly wrote before they were killed"
    with open_writer(tmp_path, **SIZES) as writer:
        assert put(writer, *range(100, 110)) == [True] * 10
        assert served(writer, *range(100, 110)) == list(range(100, 110))
    assert verify(tmp_path).exit_status == 0


def test_two_readers_meet_no_wrong_byte_while_a_writer_evicts(tmp_path: Path, nursery: Nursery) -> None:
    pid = nursery.start("write_forever", directory=str(tmp_path), start=0, universe=UNIVERSE, **SIZES)
    while len(list(tmp_path.glob("segment-*"))) < 2:
        time.sleep(0.005)
    deadline = time.monotonic() + 60
    totals: list[tuple[int, dict[str, int]]] = []
    errors: list[BaseException] = []

    def read() -> None:
        try:
            reader = DiskReader(tmp_path, SHAPE, warn=lambda line: None)
            hits = rounds = 0
            while time.monotonic() < deadline and (rounds < 60 or not failures(reader)):
                hits += len(served(reader, *range(UNIVERSE)))
                rounds += 1
                reader.refresh()
            totals.append((hits, failures(reader)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nursery.kill(pid)
    assert not errors, errors
    assert len(totals) == 2 and all(hits > 0 for hits, _ in totals)
    assert [set(failed) for _, failed in totals] == [{"failed_missing"}] * 2, "evicted under them, not damaged"
