"""A rank that dies or stops ends the run of all within seconds, with one line that names it, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.plan.plan import Plan
from tests.cli import HANGS_S, ROOT
from tests.runtime.ranks.company import EVERY, dealt_plan
from tests.runtime.running import desk
from tests.support import decisions, save_tiny

PROGRAM = "import sys; sys.argv[0] = 'runtime'; from penstock.runtime.cli import main; main()"


def children(process: int) -> list[int]:
    """Processes that ``process`` started and that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == process and state != "Z":
            found.append(int(stat.parent.name))
    return found


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


WAYS = [
    (signal.SIGKILL, 1, 2, "runtime: rank 1 (process {0}) was killed by SIGKILL; all ranks have ended\n"),
    (signal.SIGSTOP, 1, 2, "runtime: rank 1 (process {0}) was stopped; all ranks have ended\n"),
    (signal.SIGINT, 0, 130, "runtime: interrupted\n"),
    (signal.SIGKILL, 0, -signal.SIGKILL, "runtime: rank 0 (process {1}) has ended unexpectedly; all ranks have ended\n"),
]
"""What is done to which rank, the status, and what is said: of the process of rank 1, and of rank 0."""


def lost(plan: Plan, directory: Path, begun: str, how: signal.Signals, which: int) -> tuple[int, str, list[int]]:
    """Run ``plan``, and when it says ``begun`` do ``how`` to rank ``which`` -> the status, what was said, the processes of all ranks behind
    the first one. Nothing of them is left."""
    here = desk(directory, plan)
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "run", f"plan={here.plan}", "verbose=true", f"out={here.out}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None and run.stderr is not None
        said_first = [line for line, _ in zip(run.stdout, range(60), strict=False)]
        assert any(begun in line for line in said_first), (said_first, run.stderr.read())
        (watchdog,) = children(run.pid)
        ranks = by_rank(watchdog)
        assert len(ranks) == plan.ranks.count - 1
        os.kill(ranks[which - 1] if which else run.pid, how)
        _, err = run.communicate(timeout=HANGS_S)
    finally:
        run.kill()
    until = time.monotonic() + HANGS_S
    while any(map(lives, (*ranks, watchdog))) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(lives, (*ranks, watchdog)))
    return run.returncode, err, [*ranks[:1], run.pid]


def by_rank(watchdog: int) -> list[int]:
    """The processes that ``watchdog`` started, in the order of their ranks."""

    def rank(process: int) -> int:
        words = dict(word.split("=", 1) for word in Path(f"/proc/{process}/environ").read_text().split("\0") if "=" in word)
        return int(words["RANK"])

    return sorted(children(watchdog), key=rank)


@pytest.mark.parametrize(("how", "which", "status", "said"), WAYS if EVERY else WAYS[:1])
def test_all_end_when_one_is_lost(how: signal.Signals, which: int, status: int, said: str, tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path / "model", layers=12)
    endless = dealt_plan(checkpoint, decisions(pages=4096, prefill_chunk_tokens=64), 2, new_tokens=60_000)
    found, err, ranks = lost(endless, tmp_path, "evict", how, which)
    assert (found, err) == (status, said.format(*ranks)), err[-3000:]


@pytest.mark.parametrize(("how", "which", "status", "said"), WAYS[:2] if EVERY else WAYS[:1])
def test_all_end_when_one_is_lost_that_has_slices_of_experts(
    how: signal.Signals, which: int, status: int, said: str, tmp_path: Path
) -> None:
    """Of three ranks two wait for the one in every layer: its own rank for what it makes of the experts, the others for what it is told."""
    checkpoint = save_tiny(tmp_path / "model", "mixtral", layers=18, intermediate_size=96)
    made = decisions(pages=4096, prefill_chunk_tokens=64, experts=ExpertSlots(0, 72))
    endless = dealt_plan(checkpoint, made, 3, share=ExpertShare.sliced, new_tokens=60_000)
    found, err, ranks = lost(endless, tmp_path, "evict", how, which)
    assert (found, err) == (status, said.format(*ranks)), err[-3000:]


def test_a_server_that_is_interrupted_while_it_loads_ends_as_any_command_does(tmp_path: Path) -> None:
    """Its engine is rank 0 of a company of its own, and is killed: the watchdog said so, and the server took that for an end of its own."""
    plan = dealt_plan(save_tiny(tmp_path / "model", layers=12), decisions(pages=64, prefill_chunk_tokens=64), 2)
    served = replace(plan, workload=replace(plan.workload, clients=2, batch=0))
    serve = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", f"plan={desk(tmp_path, served).plan}", "port=0"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert serve.stderr is not None
        assert "listening on" in serve.stderr.readline()
        until = time.monotonic() + HANGS_S
        while not (ranks := [rank for motor in children(serve.pid) for dog in children(motor) for rank in children(dog)]):
            assert serve.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        serve.send_signal(signal.SIGINT)
        out, err = serve.communicate(timeout=HANGS_S)
    finally:
        serve.kill()
    while any(map(lives, ranks)) and time.monotonic() < until:
        time.sleep(0.1)
    assert (serve.returncode, out, err) == (130, "", "runtime: interrupted\n")
    assert not any(map(lives, ranks))
