"""SIGINT and SIGTERM at any moment: one line, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.planner.common.interrupt import DEAF_S, Terminated, import_torch, terminate_as_interrupt, uninterrupted
from penstock.runtime.cli import PROGRAM
from penstock.runtime.told.progress import PhaseBar
from tests.cli import HANGS_S, ROOT
from tests.runtime.fakes import LockingCopier
from tests.runtime.faults import before, put_in
from tests.runtime.running import Desk, desk, leaves_nothing_behind
from tests.support import decisions, plan_for, workload


@pytest.fixture(autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """Whoever runs the suite may have had them ignored."""
    usual = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, usual)


@pytest.fixture
def endless(checkpoint: Path, tmp_path: Path) -> Desk:
    return desk(tmp_path, plan_for(checkpoint, decisions(pages=4096, prefill_chunk_tokens=64), work=workload(new_tokens=60_000)))


def runtime_main(here: Desk, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit status of `runtime run` in this process."""
    monkeypatch.setattr(sys, "argv", ["runtime", "run", f"plan={here.plan}", f"out={here.out}"])
    with pytest.raises(SystemExit) as ended:
        PROGRAM.main()
    return ended.value.code


MOMENTS = ["arena", "card", "page-locking", "skeleton", "reading", "binding", "rehearsal", "load", "prefill", "report"]


ENDS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated"), signal.SIGHUP: (129, "hung up")}


@pytest.mark.parametrize(
    ("moment", "number"),
    [*((m, (signal.SIGINT, signal.SIGTERM)[k % 2]) for k, m in enumerate(MOMENTS)), ("load", signal.SIGINT), ("load", signal.SIGHUP)],
)
def test_a_signal_at_any_moment_leaves_no_thread_no_page_lock_and_no_file(
    on_a_card: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moment: str, number: int
) -> None:
    copier = LockingCopier()
    put_in(monkeypatch, copier)
    before(monkeypatch, moment, lambda: os.kill(os.getpid(), number))
    usual = signal.getsignal(number)
    with leaves_nothing_behind(on_a_card.plan.parent):
        status = runtime_main(on_a_card, monkeypatch)
    expected, word = ENDS[signal.Signals(number)]
    assert (status, capsys.readouterr().err) == (expected, f"runtime: {word}\n")
    assert not copier.held and signal.getsignal(number) == usual


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4])
def test_a_signal_after_any_time_leaves_nothing(endless: Desk, monkeypatch: pytest.MonkeyPatch, after_s: float) -> None:
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM))
    before(monkeypatch, "arena", timer.start)
    with leaves_nothing_behind(endless.plan.parent):
        status = runtime_main(endless, monkeypatch)
        timer.join()
        endless.out.unlink(missing_ok=True)
    assert status == 143


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_among_tokens_ends_a_run_with_those_that_are_known(
    endless: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    before(monkeypatch, "decode", lambda: os.kill(os.getpid(), number))
    status = runtime_main(endless, monkeypatch)
    report, told = json.loads(endless.out.read_text()), capsys.readouterr()
    expected, word = ENDS[signal.Signals(number)]
    assert (status, told.err) == (expected, f"runtime: {word}\n")
    assert report["interrupted"] and [len(reply) for reply in report["tokens"]] == [2] and report["measured"]["decode_tokens_per_s"]
    assert report["texts"][0] in told.out and json.loads(told.out.splitlines()[-1])["interrupted"]


WATCHED = """
import atexit, sys, threading
atexit.register(lambda: print('threads:', *(t.name for t in threading.enumerate() if t is not threading.main_thread()), flush=True))
from penstock.runtime.cli import main
sys.argv[0] = 'runtime'
main()
"""


def watched(here: Desk, *keys: str, **env: str) -> subprocess.Popen[str]:
    """`runtime run` as a process and session of its own, which says at its end which threads are alive."""
    return subprocess.Popen(
        [sys.executable, "-c", WATCHED, "run", f"plan={here.plan}", f"out={here.out}", *keys],
        cwd=here.plan.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def left_by_a_signal(here: Desk, temporary: Path, number: int, after_s: float | None) -> dict[str, object]:
    """What there is to see of a run that got a signal so many seconds after it had begun to listen for signals; None: among tokens."""
    process = watched(here, *(["verbose=true"] if after_s is None else []), TMPDIR=str(temporary))
    try:
        while process.poll() is None and not listens(process.pid):
            time.sleep(0.001)
        if after_s is None:
            assert sum(1 for _ in islice((line for line in process.stdout if "evict" in line), 50)) == 50
        time.sleep(after_s or 0)
        process.send_signal(number)
        out, err = process.communicate(timeout=HANGS_S)
    finally:
        process.kill()
    children = [p.pid for p in psutil.process_iter() if session(p.pid) == process.pid]
    here.out.unlink(missing_ok=True)  # where tokens were known
    files = [path.name for place in (here.plan.parent, temporary) for path in place.iterdir()]
    return {"status": process.returncode, "stderr": err, "last line": out.splitlines()[-1:], "children": children, "files": files}


def listens(pid: int) -> bool:
    """Whether a process handles SIGTERM: before, it is an interpreter that still starts."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next((int(line.split()[1], 16) for line in status if line.startswith("SigCgt")), 0)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def test_a_process_that_gets_a_signal_at_any_moment_leaves_nothing(endless: Desk, tmp_path_factory: pytest.TempPathFactory) -> None:
    """While torch is imported, while the model is loaded, among tokens; two runs at a time. No thread is alive at its end."""
    numbers = [signal.SIGINT, signal.SIGINT, signal.SIGTERM]
    moments = [*(random.Random(f"{number} {k}").uniform(1.5 * k, 1.5 * k + 1.5) for k, number in enumerate(numbers[:2])), None]
    temporaries = [tmp_path_factory.mktemp("temporary") for _ in moments]
    with ThreadPoolExecutor(2) as two:
        seen = list(two.map(partial(left_by_a_signal, endless), temporaries, numbers, moments))
    for number, after_s, left in zip(numbers, moments, seen, strict=True):
        status, word = ENDS[number]
        nothing = {"status": status, "stderr": f"runtime: {word}\n", "last line": ["threads:"], "children": [], "files": ["plan.yaml"]}
        assert left == nothing, f"after {after_s} s"


def test_a_second_signal_does_not_cut_the_giving_back_short() -> None:
    given_back = False
    with pytest.raises(Terminated), terminate_as_interrupt():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            given_back = True
    assert given_back and DEAF_S > 0.01


def test_a_library_that_stumbles_over_an_interrupt_does_not_hide_it() -> None:
    with pytest.raises(Terminated), terminate_as_interrupt():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except KeyboardInterrupt as error:
            raise UnboundLocalError("f") from error
    with pytest.raises(UnboundLocalError), terminate_as_interrupt():
        raise UnboundLocalError("f")


def test_a_run_in_which_a_library_stumbles_over_an_interrupt_ends_in_the_usual_line(
    on_a_card: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stumble() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt as error:
            raise UnboundLocalError("f") from error

    before(monkeypatch, "prefill", stumble)
    assert runtime_main(on_a_card, monkeypatch) == 130
    assert capsys.readouterr().err == "runtime: interrupted\n"


def test_a_signal_that_a_library_swallows_is_heard_where_work_goes_on() -> None:
    reached = []
    with pytest.raises(Terminated), terminate_as_interrupt():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        reached.append("library")
        PhaseBar()("decode", 1, 2)
        reached.append("next token")
    assert reached == ["library"]
    PhaseBar()("decode", 1, 2)


def test_a_signal_that_meets_a_finalizer_prints_nothing_and_is_heard_where_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    class Broken:
        def __del__(self) -> None:
            raise ValueError("a finalizer's own")

    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(type(unraisable.exc_value)))
    usual = sys.unraisablehook
    with pytest.raises(Terminated), terminate_as_interrupt():
        Held()
        Broken()
        PhaseBar()("decode", 1, 2)
    assert told == [ValueError] and sys.unraisablehook is usual


def test_a_signal_while_something_is_taken_is_heard_right_after() -> None:
    taken = []
    with pytest.raises(Terminated), terminate_as_interrupt():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            taken.append(True)
        taken.append(False)
    assert taken == [True]


def test_a_signal_while_torch_is_imported_is_heard_once_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []

    def import_slowly(name: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        reached.append(name)

    monkeypatch.setattr("importlib.import_module", import_slowly)
    with pytest.raises(Terminated), terminate_as_interrupt():
        import_torch()
        reached.append("what comes after")
    assert reached == ["torch"]


def test_a_signal_that_was_ignored_from_the_start_stays_ignored() -> None:
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with terminate_as_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)
