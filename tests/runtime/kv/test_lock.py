"""One writer a directory, and everyone may know who."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.runtime.kv.disk.disk_pages import DiskReader
from penstock.runtime.kv.disk.writer_lock import LOCK
from tests.runtime.kv.nursery import Nursery
from tests.runtime.kv.pages import SHAPE, open_writer, put


def test_a_second_writer_is_told_of_the_first_and_allowed_when_that_was_killed(tmp_path: Path, nursery: Nursery) -> None:
    pid = nursery.hold(tmp_path)
    with pytest.raises(UserError) as refused:
        open_writer(tmp_path)
    line = str(refused.value)
    assert f"process {pid} of host {socket.gethostname()} (since 20" in line and "another directory" in line and "\n" not in line
    DiskReader(tmp_path, SHAPE)
    nursery.kill(pid)
    with open_writer(tmp_path) as writer:
        assert put(writer, 0) == [True]


def test_a_second_writer_of_the_same_process_is_refused_until_the_first_closes(tmp_path: Path) -> None:
    first = open_writer(tmp_path)
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        open_writer(tmp_path)
    assert put(first, 0) == [True], "the first is not disturbed"
    first.close()
    open_writer(tmp_path).close()


def test_a_holder_that_left_no_name_is_refused_all_the_same(tmp_path: Path) -> None:
    with open_writer(tmp_path):
        (tmp_path / LOCK).write_text("{")
        with pytest.raises(UserError, match="another process"):
            open_writer(tmp_path)


def test_an_opening_that_fails_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("penstock.runtime.kv.disk.disk_pages.load", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(UserError, match="Input/output error"):
            open_writer(tmp_path)
    open_writer(tmp_path).close()
