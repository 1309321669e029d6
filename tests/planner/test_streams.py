"""Both programs from their first moment on: signals, closed and full streams, limits, and a directory that is gone."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.planner.cli import PROGRAM
from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import LEFT_BY_READER, Terminated, terminate_as_interrupt
from penstock.planner.common.outside.starved import starved
from penstock.planner.common.outside.streams import _Output
from penstock.planner.solver.terms.linear import LinearProgram
from tests.cli import HANGS_S, ROOT

STUBBED = "import importlib, os, sys, penstock.scripts as scripts; importlib.import_module = lambda name: {}; scripts.runtime()"
"""The console script, which does something else in place of importing its program."""


def ended(instead: str, **streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", STUBBED.format(instead)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, timeout=HANGS_S, **streams)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "hung up")], ids=str
)
def test_a_signal_among_the_first_imports_is_one_line(number: signal.Signals, word: str) -> None:
    heard = functools.partial(signal.signal, number, signal.SIG_DFL)  # whoever runs the suite may have had it ignored
    process = ended(f"os.kill(os.getpid(), {int(number)})", stderr=subprocess.PIPE, preexec_fn=heard)
    assert (process.returncode, process.stderr) == (128 + number, f"runtime: {word}\n")


@pytest.mark.parametrize("verb", [("doctor", "json=false"), ("simulate", "demo=small-cache"), ("solve", "--help")], ids=" ".join)
def test_who_closes_our_output_ends_us_as_a_closed_pipe_does(verb: tuple[str, ...], tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    code = "import sys, penstock.scripts as scripts; sys.argv[0] = 'planner'; scripts.planner()"
    with open(write, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-c", code, *verb],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANGS_S,
        )
    assert (done.returncode, done.stderr) == (LEFT_BY_READER, "")


def test_a_signal_that_the_process_was_started_to_ignore_stays_ignored() -> None:
    asked = f"sys.exit(7) if os.kill(os.getpid(), {int(signal.SIGHUP)}) is None else 0"
    process = ended(asked, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert process.returncode == 7


def test_a_closed_stream_gets_no_file_of_ours() -> None:
    asked = "(print('lost', flush=True), os._exit(0 if os.open(__file__ if 0 else os.devnull, os.O_RDONLY) > 2 else 1))"
    process = ended(asked, preexec_fn=lambda: os.closerange(0, 3))
    assert process.returncode == 0


def test_too_little_memory_for_the_first_imports_is_one_line() -> None:
    process = ended("(_ for _ in ()).throw(MemoryError())", stderr=subprocess.PIPE)
    assert process.returncode == 2 and process.stderr.startswith("runtime: memory ran out") and process.stderr.count("\n") == 1


def test_a_full_disk_behind_standard_output_is_said_once() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        output = io.TextIOWrapper(io.BufferedWriter(_Output(full.fileno())))
        print("text", file=output)
        with pytest.raises(UserError, match=r"standard output cannot be written \(No space left on device\); send it elsewhere"):
            output.flush()
        print("more", file=output, flush=True)
        output.close()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "memory ran out"),
        (ImportError("x.so: failed to map segment from shared object"), "memory ran out"),
        (RuntimeError("can't start new thread"), "no further thread or process could be started"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "no further thread or process"),
        (PermissionError(errno.EACCES, "Permission denied", "/locked/x"), "/locked/x: Permission denied; "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_machine_denies_is_told_apart_from_a_bug(error: Exception, line: str) -> None:
    wrapped = ValueError("a library's own words")
    wrapped.__cause__ = error
    assert str(starved(wrapped)).startswith(line)
    assert starved(ValueError("a bug")) is None and starved(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None


def test_arguments_that_are_no_text_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["planner", "solve", os.fsdecode(b"out=r\xff.yaml")])
    with pytest.raises(SystemExit) as left:
        PROGRAM.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == "planner: out=r\\xff.yaml: not text in UTF-8; write it so, or rename the file\n"


def test_a_directory_that_was_removed_is_no_place_to_work_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "argv", ["planner", "solve"])
    with pytest.raises(SystemExit) as left:
        PROGRAM.main()
    os.chdir(tmp_path)
    assert left.value.code == 2
    assert capsys.readouterr().err == "planner: the working directory was removed; change to one that exists\n"


def test_a_refusal_is_one_line_whatever_it_names() -> None:
    assert str(UserError("x\n\x1b[31mred\ud800é")) == "x\\n\\x1b[31mred\\ud800é"


def test_a_signal_that_a_library_swallows_is_heard_before_the_next_program_is_solved() -> None:
    program = LinearProgram()
    share = program.integer("share", 0, 1)
    with pytest.raises(Terminated), terminate_as_interrupt():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        program.minimise(share)
    assert program.minimise(share) and share.varValue == 0
