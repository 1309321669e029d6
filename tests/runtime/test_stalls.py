"""An SSD that slows down in the middle: the run goes on and names the stall."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.runtime.engine.sides.host_side
import penstock.runtime.reading.reader
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.reading.stalls import ENOUGH, LEAST_S, Stalls
from tests.runtime.running import desk
from tests.support import decisions, plan_for


class Drive:
    """Takes a millisecond for a read, and ``SLOW_S`` for three of them. It tells so; nobody waits."""

    SLOW_S = 0.2

    def __init__(self, after: int):
        self._after, self._reads = after, itertools.count()
        self._took = threading.local()

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._took.seconds = self.SLOW_S if self._after <= next(self._reads) < self._after + 3 else 0.001
        return os.preadv(fd, views, offset)

    def stalls(self, usual_s: float = 0.0) -> Stalls:
        """Stalls by the drive's own clock; each is noted by the thread that read."""
        made = Stalls(usual_s)
        note = made.note
        made.note = lambda seconds, file, offset: note(self._took.seconds, file, offset)  # type: ignore[method-assign]
        return made


def test_a_run_on_a_drive_that_slows_down_goes_on_and_names_the_stall(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, drive = desk(tmp_path, plan_for(checkpoint, decisions(pages=8))), Drive(40)
    usual = here.run()
    capsys.readouterr()
    monkeypatch.setattr(penstock.runtime.engine.sides.host_side, "ReadPool", partial(ReadPool, preadv=drive.preadv))
    monkeypatch.setattr(penstock.runtime.reading.reader, "Stalls", drive.stalls)
    report = here.run()
    stalls = report["stalls"]
    assert report["tokens"] == usual["tokens"]
    assert stalls["count"] == 3 and stalls["longest_s"] == drive.SLOW_S
    assert stalls["median_s"] == pytest.approx(0.001, rel=0.1) and stalls["lost_s"] == pytest.approx(3 * 0.199, rel=0.01)
    assert Path(stalls["file"]).parent == checkpoint and stalls["offset"] >= 0 and stalls["when"]
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"{stalls['count']} reads stalled and lost {stalls['lost_s']:.2f} s" in said
    assert f"at offset {stalls['offset']} of {stalls['file']}, {stalls['when']}" in said


def test_stalls_are_counted_against_the_median_of_all_reads() -> None:
    stalls = Stalls()
    for _ in range(3 * ENOUGH):
        stalls.note(0.004, Path("a"), 0)
    for seconds in (0.02, 0.05, 0.031):
        stalls.note(seconds, Path("slow"), 4096)
    facts = stalls.facts()
    assert facts == facts | {"count": 1, "longest_s": 0.05, "file": "slow", "offset": 4096}
    assert facts["median_s"] == pytest.approx(0.004, rel=0.1) and facts["lost_s"] == pytest.approx(0.046, rel=0.1)


@settings(deadline=None)
@given(usual_s=st.floats(0.002, 0.1), before=st.integers(ENOUGH, 300), slow=st.integers(1, 300))
def test_a_drive_that_becomes_ten_times_slower_for_good_is_named(usual_s: float, before: int, slow: int) -> None:
    stalls = Stalls()
    for k in range(before):
        stalls.note(usual_s, Path("weights"), k)
    for k in range(before, before + slow):
        stalls.note(10 * usual_s, Path("weights"), k)
    facts = stalls.facts()
    assert 1 <= facts["count"] <= slow and before <= facts["offset"] < before + slow and facts["file"] == "weights"
    assert facts["lost_s"] == pytest.approx(9 * usual_s * facts["count"], rel=0.02)


def test_a_few_reads_or_short_ones_make_no_stall() -> None:
    stalls = Stalls()
    stalls.note(5.0, Path("first"), 0)
    for _ in range(3 * ENOUGH):
        stalls.note(1e-5, Path("a"), 0)
    stalls.note(0.9 * LEAST_S, Path("a"), 0)
    assert stalls.facts()["count"] == 0 and stalls.facts()["file"] is None


def test_reads_as_the_drive_was_measured_are_no_stalls_after_faster_ones() -> None:
    """What a host had cached is read first."""
    stalls = Stalls(usual_s=0.03)
    for k in range(20):
        stalls.note(0.002, Path("w"), k)
    for k in range(400):
        stalls.note(0.025, Path("w"), k)
    assert stalls.count == 0
    stalls.note(0.5, Path("w"), 7)
    assert stalls.count == 1 and stalls.longest is not None and stalls.longest.offset == 7
