"""A rank that dies or stops ends the run of all within seconds, with one line that names it, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    (signal.SIGKILL, 2, "runtime: rank 1 (process {0}) was killed by SIGKILL; all ranks have ended\n"),
    (signal.SIGSTOP, 2, "runtime: rank 1 (process {0}) was stopped; all ranks have ended\n"),
    (signal.SIGINT, 130, "runtime: interrupted\n"),
]


@pytest.mark.parametrize(("how", "status", "said"), WAYS if EVERY else WAYS[:1])
def test_all_end_when_one_is_lost(how: signal.Signals, status: int, said: str, tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path / "model", layers=12)
    endless = dealt_plan(checkpoint, decisions(pages=4096, prefill_chunk_tokens=64), 2, new_tokens=60_000)
    here = desk(tmp_path, endless)
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "run", f"plan={here.plan}", "verbose=true", f"out={here.out}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run.stdout is not None
        said_first = [line for line, _ in zip(run.stdout, range(60), strict=False)]
        assert any("evict" in line for line in said_first), (said_first, run.stderr.read())
        (watchdog,) = children(run.pid)
        (rank,) = children(watchdog)
        os.kill(run.pid if how is signal.SIGINT else rank, how)
        _, err = run.communicate(timeout=HANGS_S)
    finally:
        run.kill()
    assert (run.returncode, err) == (status, said.format(rank)), err[-3000:]
    until = time.monotonic() + HANGS_S
    while (lives(rank) or lives(watchdog)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not lives(rank) and not lives(watchdog)
