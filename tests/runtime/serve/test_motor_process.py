"""The motor as a process: it loads what it is told, answers, reports, and ends when it should."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.planner.contract.plan.planfile import write_plan
from penstock.runtime.serve.wire.messages import Failed, Loading, Open, Ready
from tests.cli import ROOT
from tests.runtime.serve.motors import Front, serving_plan, submit


@contextmanager
def started() -> Iterator[tuple[Front, subprocess.Popen[bytes]]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "penstock.runtime.serve.motor.motor", str(theirs.fileno())]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env, cwd="/", stderr=subprocess.PIPE)
        theirs.close()
        try:
            yield Front(ours), process
        finally:
            process.kill()
            process.communicate()


def test_a_motor_loads_answers_and_ends_with_its_front(exact_checkpoint: Path, tmp_path: Path) -> None:
    write_plan(serving_plan(exact_checkpoint), tmp_path / "plan.yaml")
    with started() as (front, process):
        front.say(Open(str(tmp_path / "plan.yaml")))
        front.hear(lambda: bool(front.others) and isinstance(front.others[-1], Ready))
        assert any(isinstance(message, Loading) for message in front.others)
        info = front.others[-1].info
        assert (info.vocab, info.capacity_tokens, info.limits["rows"]) == (300, 96, 4)
        assert info.longest_pass_s > info.predicted["decode_s_per_token"]
        (heard,) = front.answers(submit(0, [1, 2, 3], 5))
        assert len(heard.tokens[0]) == 5
        front.say(submit(1, [1, 2, 3], 60))
        front.close()
        assert process.wait(30) == 1


def test_a_motor_whose_front_goes_while_it_loads_ends_without_a_word(exact_checkpoint: Path, tmp_path: Path) -> None:
    write_plan(serving_plan(exact_checkpoint), tmp_path / "plan.yaml")
    with started() as (front, process):
        front.say(Open(str(tmp_path / "plan.yaml")))
        front.hear(lambda: bool(front.others))
        assert isinstance(front.others[0], Loading)
        front.close()
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said) == (1, b"")


def test_a_plan_that_cannot_be_served_is_one_line(tmp_path: Path) -> None:
    with started() as (front, process):
        front.say(Open(str(tmp_path / "none.yaml")))
        front.hear(lambda: bool(front.others) and isinstance(front.others[-1], Failed))
        failed = front.others[-1]
        assert failed.remedied and "none.yaml" in failed.message and "\n" not in failed.message
        assert process.wait(30) == 2
