"""Reads that fail in the middle of a run: tried again, or one line with file and offset, and nothing left behind."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.contract.decided.decisions import CachePolicy
from penstock.runtime.engine.session import Session
from penstock.runtime.reading import block_reader
from penstock.runtime.reading import reader as reader_module
from penstock.runtime.told.progress import PhaseBar
from penstock.runtime.tools.runtime_verbs import run_verb
from tests.runtime.running import Desk, desk, leaves_nothing_behind
from tests.support import decisions, plan_for

SHARD = "model.safetensors"


class Wire:
    """``os.preadv`` of every pool, which goes wrong as a test says once the run generates."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.broken: Callable[[int, Sequence[memoryview], int], int] | None = None
        self.failed_at: list[int] = []
        real_pool, real_preadv = reader_module.ReadPool.__init__, os.preadv

        def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
            if self.broken is None:
                return real_preadv(fd, views, offset)
            return self.broken(fd, views, offset)

        def pool(this: Any, *args: Any, **keys: Any) -> None:
            real_pool(this, *args, **keys, preadv=preadv)

        monkeypatch.setattr(reader_module.ReadPool, "__init__", pool)
        monkeypatch.setattr(block_reader, "BACK_OFF_S", (0.0, 0.0, 0.0))
        real_generating = Session.generating

        def generating(*args: Any, **keys: Any) -> Any:
            self.broken = self._break
            return real_generating(*args, **keys)

        monkeypatch.setattr(Session, "generating", generating)
        self.action: Callable[[int, Sequence[memoryview], int], int] = real_preadv

    def _break(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.failed_at.append(offset)
        return self.action(fd, views, offset)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def io_error(fd: int, views: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.EIO, "Input/output error")


def gone(fd: int, views: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.ENXIO, "No such device or address")


def ends(fd: int, views: Sequence[memoryview], offset: int) -> int:
    return 0


@pytest.mark.parametrize("policy", CachePolicy)
@pytest.mark.parametrize(("action", "tries", "problem"), [(io_error, 4, "Input/output error"), (ends, 4, "the file ends there")])
def test_a_read_that_keeps_failing_is_retried_then_ends_the_run_with_file_and_offset(
    checkpoint: Path, tmp_path: Path, wire: Wire, action: Any, tries: int, problem: str, policy: CachePolicy
) -> None:
    wire.action = action
    here = desk(tmp_path, plan_for(checkpoint, decisions(policy=policy)))
    line = here.refusal(max_new_tokens=8)
    assert str(checkpoint / SHARD) in line and f"failed {tries} times ({problem})" in line
    offsets = [o for o in set(wire.failed_at) if f"at offset {o} " in line]
    assert offsets and wire.failed_at.count(offsets[0]) >= tries


def test_a_read_error_that_does_not_pass_ends_the_run_at_once(here: Desk, own_checkpoint: Path, wire: Wire) -> None:
    wire.action = gone
    line = here.refusal()
    assert str(own_checkpoint / SHARD) in line and "No such device" in line and "offset" in line


def test_reads_that_fail_once_are_retried_and_change_nothing(here: Desk, wire: Wire) -> None:
    real, calls = os.preadv, itertools.count()
    want = here.run()["tokens"]

    def flaky(fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Of every five reads one fails and one falls short."""
        turn = next(calls) % 5
        if turn == 0:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, [views[0][:4096]] if turn == 1 else views, offset)

    wire.action = flaky
    report = here.run()
    assert report["tokens"] == want
    assert report["ssd"]["retries"] > next(calls) // 10 > 0, "reads go on while the report is made, so some of the fifth are not in it"


def test_a_file_that_is_cut_during_the_run_ends_it_naming_the_file(here: Desk, own_checkpoint: Path, wire: Wire) -> None:
    real = os.preadv

    def cut(fd: int, views: Sequence[memoryview], offset: int) -> int:
        os.truncate(own_checkpoint / SHARD, 100_000)
        return real(fd, views, offset)

    wire.action = cut
    assert str(own_checkpoint / SHARD) in here.refusal()


def test_an_older_report_survives_a_run_that_fails(here: Desk, wire: Wire) -> None:
    here.out.write_text(json.dumps({"of": "yesterday"}))
    wire.action = io_error
    here.refusal()
    assert json.loads(here.out.read_text()) == {"of": "yesterday"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("a bug"), MemoryError()])
def test_whatever_ends_a_run_in_the_middle_leaves_nothing_behind(
    here: Desk, monkeypatch: pytest.MonkeyPatch, error: BaseException | type[BaseException]
) -> None:
    def tell(self: Any, phase: str, done: int, total: int) -> None:
        if phase == "decode" and done == 2:
            raise error

    monkeypatch.setattr(PhaseBar, "__call__", tell)
    with leaves_nothing_behind(here.plan.parent), pytest.raises(error if isinstance(error, type) else type(error)):
        run_verb(here.config())


def test_a_run_that_succeeds_leaves_its_report_alone(here: Desk) -> None:
    with leaves_nothing_behind(here.plan.parent):
        here.run()
        here.out.unlink()
