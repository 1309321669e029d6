"""The boundary to Hydra: what a verb's task receives, and what of its failures a user sees."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import HANGS_S, ROOT, command

PROGRAM = """
import sys, hydra
from dataclasses import dataclass, field
from omegaconf import MISSING
from penstock.planner.common.command.app import Program, Verb, job
from penstock.planner.common.errors import UserError

@dataclass
class Config:
    what: str = MISSING
    number: int = 1
    out: str = "out.txt"

@hydra.main(version_base="1.3", config_path="pkg://penstock.conf", config_name="verify")
@job
def verify(cfg):
    '''fail as asked'''
    if cfg.what == "mistake":
        raise UserError("a mistake")
    if cfg.what == "interrupt":
        raise KeyboardInterrupt
    if cfg.what == "bug":
        raise RuntimeError("a bug")
    print(type(cfg).__name__, cfg.what, cfg.number, cfg.out)

sys.argv[0] = "prog"
Program("prog", "tries.", (Verb(verify, Config, "prog verify"),)).main()
"""


Prog = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def prog(tmp_path: Path) -> Prog:
    script = tmp_path / "prog.py"
    script.write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "work").mkdir()

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        line, env = [sys.executable, str(script), *args], {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(line, cwd=tmp_path / "work", env=env, capture_output=True, text=True, timeout=HANGS_S)

    return run


def test_the_task_receives_its_schemas_dataclass(prog: Prog) -> None:
    result = prog("verify", "what=thing", "number=3")
    assert (result.returncode, result.stdout) == (0, "Config thing 3 out.txt\n")


def test_a_missing_key_is_asked_for(prog: Prog) -> None:
    result = prog("verify")
    assert result.returncode == 2
    assert "what=... is required" in result.stderr


def test_a_users_mistake_is_one_line_and_status_2(prog: Prog) -> None:
    result = prog("verify", "what=mistake")
    assert (result.returncode, result.stderr) == (2, "prog: a mistake\n")


def test_an_interrupt_is_one_line_and_status_130(prog: Prog) -> None:
    result = prog("verify", "what=interrupt")
    assert (result.returncode, result.stderr) == (130, "prog: interrupted\n")


def test_a_bug_keeps_its_traceback(prog: Prog) -> None:
    result = prog("verify", "what=bug")
    assert result.returncode == 1
    assert "RuntimeError: a bug" in result.stderr
    assert "Traceback" in result.stderr


def said(tmp_path: Path) -> list[str]:
    """What each point of the first sweep wrote, in their order."""
    return [path.read_text() for path in sorted((tmp_path / "work" / "sweeps" / "0").glob("*/output.txt"))]


def test_a_sweep_goes_on_after_a_mistake_and_fails_at_its_end(prog: Prog, tmp_path: Path) -> None:
    result = prog("verify", "-m", "what=one,mistake,three")
    assert result.returncode == 2
    first, *_, last = said(tmp_path)
    assert "Config one 1 sweeps/0/0/out.txt" in first and "Config three 1 sweeps/0/2/out.txt" in last
    assert result.stdout.splitlines()[:2] == ["[0]  what='one'  status 0", "[2]  what='three'  status 0"]
    assert result.stderr == "[1]  what='mistake'  a mistake\n"


def test_absolute_outputs_of_a_sweep_stay_where_they_are_and_are_one_for_each_point(prog: Prog, tmp_path: Path) -> None:
    prog("verify", "-m", "what=one", f"out={tmp_path}/x,{tmp_path}/y")
    outputs = [(tmp_path / "work" / text.split()[-1]).resolve() for text in said(tmp_path)]
    assert outputs == [(tmp_path / name).resolve() for name in ("x", "y")]
    refused = prog("verify", "-m", "what=one,two", f"out={tmp_path}/x")
    assert refused.returncode == 2 and f"out={tmp_path}/x: all points of the sweep would write it" in refused.stderr


def test_flags_may_stand_between_overrides(prog: Prog, tmp_path: Path) -> None:
    result = prog("verify", "what=one", "--multirun", "number=1,2")
    assert result.returncode == 0, result.stderr
    assert [text.split()[:3] for text in said(tmp_path)] == [["Config", "one", "1"], ["Config", "one", "2"]]


def test_every_verb_of_the_runtime_answers_help_and_cfg(tmp_path: Path) -> None:
    for verb in ("run", "pack", "verify", "kv", "synth"):
        assert command("runtime", verb, "--help", cwd=tmp_path).stdout.startswith(f"runtime {verb}: ")
        assert command("runtime", verb, "--cfg", "job", cwd=tmp_path).returncode == 0
    assert list(tmp_path.iterdir()) == []
