"""What a launcher says of a process, and when it ends it: whatever cannot be is one line, before torch is imported."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from penstock.planner.common.errors import UserError
from penstock.runtime.company.company import Company, Seat, seat_of_environment
from penstock.runtime.led import launched
from tests.cli import HANGS_S, ROOT

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch):
    """The seat of a process in which torchrun's variables are changed so; None leaves one out."""

    def found(**changed: str | None) -> Seat | None:
        for name, value in (TORCHRUN | changed).items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        return seat_of_environment()

    return found


def test_a_launched_process_has_a_seat_and_another_has_none(seat) -> None:
    assert seat() == Seat(1, 4, 1, 2)
    assert seat(RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR=None) == Seat(0, 1, 1, 1)
    assert seat(RANK=None) is None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "²"}, "RANK=²: must be a number, as torchrun sets it; unset RANK and WORLD_SIZE"),
        ({"RANK": "4"}, "RANK=4: must be less than WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3: each host must have as many of WORLD_SIZE=4 ranks; give torchrun the same"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5: each host must have as many"),
        ({"MASTER_ADDR": None}, "RANK and WORLD_SIZE are set, and MASTER_ADDR is not: torchrun sets all of them; unset RANK"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not"),
    ],
)
def test_what_cannot_be_is_one_line(changed, said, seat) -> None:
    with pytest.raises(UserError, match=said):
        seat(**changed)


@pytest.mark.parametrize("lost", [False, True])
def test_a_launchers_sigterm_leaves_the_word_to_the_line_that_names_the_lost_rank(lost, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes a moment behind the rank's end: rank 0 said that it was terminated, and nobody which rank was lost."""
    came: list[int] = []
    company = Company(Seat(0, 2), None)
    monkeypatch.setattr(launched, "MOMENT_S", 0.2)
    usual = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        launched.end_by_line(company)
        ending = threading.Timer(0.05, company.kill_others if lost else threading.Event)
        ending.start()
        signal.raise_signal(signal.SIGTERM)
        ending.join()
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert came == ([] if lost else [signal.SIGTERM])


MEETING = """
from datetime import timedelta
from penstock.planner.common.errors import UserError
from penstock.runtime.company import company
company.MEETING_TIME = timedelta(seconds=1)
try:
    company.Company(company.seat_of_environment(), None).join()
except UserError as error:
    print(error)
"""


def test_a_rank_that_hangs_before_all_have_met_is_not_waited_for_without_an_end() -> None:
    """No watchdog looks after them yet: a launched rank that was stopped while it imported torch held up the others for ever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    seat = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **seat, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", MEETING], env=env, capture_output=True, text=True, timeout=HANGS_S)
    line = f"not all of 4 ranks came to 127.0.0.1:{port} within 1 s; see which one hangs or has ended, and start all of them again\n"
    assert (ended.returncode, ended.stdout) == (0, line), ended.stderr
