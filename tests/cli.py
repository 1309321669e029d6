"""Running the programs as a user does."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[1]
HANGS_S = 600
"""A process that has not ended by then never will. No test asks how long one takes."""


def docs_script(name: str) -> ModuleType:
    """``docs/name.py``, which is in no package, as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def lazily(name: str) -> ModuleType:
    """The package ``name``, imported when it is first used: every worker collects every file, and one runs it."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None, name
    loader = spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def process(program: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """``program args`` as a process of its own in ``cwd``, with ``env`` on top of the environment, against this checkout."""
    code = f"import sys; sys.argv[0] = {program!r}; from penstock.{program}.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, "-c", code, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=HANGS_S)


ASKED_OF = {
    "solver.planning": "choose",
    "solver.impossible": "optimum",
    "solver.layer_counts": "optimum",
    "solver.ranks_choice": "optimum",
    "explain.explanation": "optimum",
}
"""Where a verb asks the integer program, and by which name."""


@cache
def answers() -> dict[tuple[str, str], Any]:
    """What the program answered commands of this process, by who was asked and the whole question."""
    return {}


def remembered(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``ask`` that solves no question again which an earlier command has asked: half of all commands are about the same few."""

    def asked(question: Any) -> Any:
        key = (ask.__qualname__, repr(question))
        if key not in answers():
            answers()[key] = ask(question)
        return answers()[key]

    return asked


def command(program: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """What ``process`` returns, without a process: its start takes longer than most commands, and solves the same anew."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(mock.patch.dict(os.environ, env))
        stack.enter_context(mock.patch.object(sys, "argv", [program, *args]))
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(complained))
        for room, name in ASKED_OF.items():
            module = importlib.import_module(f"penstock.planner.{room}")
            stack.enter_context(mock.patch.object(module, name, remembered(getattr(module, name))))
        left = stack.enter_context(pytest.raises(SystemExit))
        importlib.import_module(f"penstock.{program}.cli").main()
    return subprocess.CompletedProcess([program, *args], left.value.code or 0, said.getvalue(), complained.getvalue())


def refusal(program: str, *args: str, cwd: Path, **env: str) -> str:
    """The one line that refuses ``args``: exit status 2, nothing else on stderr, no file written."""
    before = sorted(cwd.rglob("*"))
    done = command(program, *args, cwd=cwd, **env)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert sorted(cwd.rglob("*")) == before
    return done.stderr.strip()
