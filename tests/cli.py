"""Running the programs as a user does."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
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


def command(program: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """What ``process`` returns, without a process: its start takes longer than most commands."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(cwd))
        stack.enter_context(mock.patch.dict(os.environ, env))
        stack.enter_context(mock.patch.object(sys, "argv", [program, *args]))
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(complained))
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
