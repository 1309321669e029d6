"""What goes wrong in the middle: a run goes on and says so, or ends in one line and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import runtime.engine
from planner.errors import UserError
from planner.interrupt import DEAF_S, Terminated, terminate_as_interrupt, uninterrupted
from runtime import arena as arena_module
from runtime.arena import Arena
from runtime.cli import PROGRAM
from runtime.cuda import VramWatch, context_bytes, process_vram_bytes, told_when_vram_runs_out
from runtime.device import split_copy
from runtime.engine import Engine, EngineOptions
from runtime.generate import Batch, Sampler, Sampling, Sequences, generate
from runtime.memory import refuse_if_short
from runtime.model import open_skeleton
from runtime.pageable import slowed_by_pageable
from runtime.progress import PhaseBar
from runtime.store.reader import ReadPool
from runtime.store.stalls import ENOUGH, LEAST_S, Stalls
from tests.cli import ROOT
from tests.runtime.fakes import LockingCopier
from tests.runtime.running import Desk, desk, leaves_nothing_behind
from tests.support import HostCopier, decisions, plan_for, save_tiny, workload

CPU = torch.device("cpu")
MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_LARGEST_PIECE", 256 * KIB)
    monkeypatch.setattr(arena_module, "_SMALLEST_PIECE", 16 * KIB)


@pytest.fixture
def on_a_card(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A desk whose runs take the CPU for a card that locks every page."""
    put_in(monkeypatch, LockingCopier())
    return desk(tmp_path, plan_for(checkpoint, decisions(gpu=True, pages=8), gpu=True))


def put_in(monkeypatch: pytest.MonkeyPatch, copier: HostCopier) -> None:
    monkeypatch.setattr("runtime.job._device", lambda plan: CPU)
    monkeypatch.setattr("runtime.run.open_cuda", lambda plan, device: copier)


# Page-locking


def test_an_arena_is_locked_whole_where_that_is_granted() -> None:
    lock = LockingCopier()
    arena = Arena(3 * MIB)
    arena.occupy(lock)
    assert list(lock.held.values()) == [arena.nbytes] == [arena.locked_bytes] and arena.refused is None
    arena.close()
    arena.close()
    assert not lock.held


@given(nbytes=st.integers(1, 2 * MIB), most=st.integers(0, 3 * MIB))
@settings(max_examples=60, deadline=None)
def test_an_arena_that_is_refused_whole_is_locked_as_far_as_the_limit_allows(nbytes: int, most: int) -> None:
    lock = LockingCopier(most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena_module, "_LARGEST_PIECE", 256 * KIB)
        patch.setattr(arena_module, "_SMALLEST_PIECE", 16 * KIB)
        arena = Arena(nbytes)
        arena.occupy(lock)
    try:
        assert sum(lock.held.values()) == arena.locked_bytes <= most
        expected = sorted(lock.held)
        start = arena.tensor.data_ptr()
        assert not expected or (expected[0] == start and max(a + n for a, n in lock.held.items()) == start + arena.locked_bytes)
        if arena.nbytes <= most:
            assert arena.refused is None and arena.locked_bytes == arena.nbytes
        else:
            assert arena.refused == "CUDA error 2"
            assert arena.locked_bytes > min(most, arena.nbytes) - 32 * KIB or arena.nbytes < 64 * KIB
        assert arena.is_locked(0, arena.locked_bytes) and not arena.is_locked(0, arena.locked_bytes + 1)
    finally:
        arena.close()
    assert not lock.held


def test_an_arena_that_is_only_too_large_for_one_lock_is_locked_in_pieces(small_pieces: None) -> None:
    lock = LockingCopier(largest=300 * KIB)
    arena = Arena(MIB)
    arena.occupy(lock)
    assert arena.locked_bytes == MIB and arena.refused is None and len(lock.held) == 4
    arena.close()
    assert not lock.held


def test_an_interrupt_while_pages_are_locked_unlocks_them(small_pieces: None) -> None:
    class Interrupted(LockingCopier):
        def lock(self, address: int, nbytes: int) -> str | None:
            if len(self.held) == 2:
                self.held[address] = nbytes
                raise KeyboardInterrupt
            return super().lock(address, nbytes)

    lock, arena = Interrupted(largest=300 * KIB), Arena(MIB)
    with pytest.raises(KeyboardInterrupt):
        arena.occupy(lock)
    assert len(lock.held) == 3
    arena.close()
    assert not lock.held


@given(start=st.integers(0, 40), nbytes=st.integers(1, 40), cuts=st.sets(st.integers(0, 90), max_size=6))
def test_a_copy_is_cut_at_the_borders_of_locked_pieces_and_nowhere_else(start: int, nbytes: int, cuts: set[int]) -> None:
    src, dst = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    borders = sorted(src.data_ptr() + cut for cut in cuts)
    parts = list(split_copy(dst[:nbytes], src[start : start + nbytes], borders))
    for to, from_ in parts:
        first, last = from_.data_ptr(), from_.data_ptr() + from_.numel()
        assert from_.numel() and not any(first < border < last for border in borders)
        to.copy_(from_)
    assert torch.equal(dst[:nbytes], src[start : start + nbytes]) and not dst[nbytes:].any()
    assert len(parts) == 1 + sum(start < cut < start + nbytes for cut in cuts)


BATCH = Batch(prompts=[[5, 9, 200], [17, 250]], max_new_tokens=4, capacity=64, chunk_tokens=1 << 20)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_without_page_locking_logits_are_the_same(tmp_path: Path, model_type: str, small_pieces: None) -> None:
    """The embedding table lies where kernels cannot reach it: its rows are looked up by the CPU."""
    store = save_tiny(tmp_path, model_type, tied=model_type != "llama")
    results = []
    for copier in (LockingCopier(), LockingCopier(0), LockingCopier(1300 * KIB)):
        engine = Engine(plan_for(store, decisions(gpu=True), gpu=True), open_skeleton(store), copier, CPU, EngineOptions())
        try:
            engine.load(BATCH, lambda *_: None)
            sequences = Sequences(engine.model, CPU, BATCH, engine.stream.begin_pass)
            results.append(generate(sequences, BATCH, Sampler(Sampling(), CPU), keep_logits=True))
            facts = engine.facts()["arena"]
        finally:
            engine.close()
        assert not copier.held
        assert bool(facts["refused"]) == bool(copier.refusals) == (facts["page_locked_bytes"] < facts["bytes"])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0].logits, other.logits, strict=True))


def test_a_run_without_page_locking_goes_on_says_what_it_costs_and_predicts_anew(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True, pages=8), gpu=True)
    here = desk(tmp_path, plan)
    put_in(monkeypatch, LockingCopier())
    usual = here.run(max_new_tokens=3)
    assert usual["arena"] == usual["arena"] | {"refused": None, "page_locked_bytes": usual["arena"]["bytes"]}
    assert "page-locking" not in capsys.readouterr().out
    put_in(monkeypatch, LockingCopier(0))
    report = here.run(max_new_tokens=3)
    assert report["arena"] == report["arena"] | {"refused": "CUDA error 2", "page_locked_bytes": 0}
    assert report["tokens"] == usual["tokens"]
    slower = report["predicted"]["decode_stages"]["h2d"] / usual["predicted"]["decode_stages"]["h2d"]
    assert slower == pytest.approx(20 / 5), "the profile's pageable rate in place of the link's"
    said = " ".join(capsys.readouterr().out.split())
    assert "page-locking was refused (CUDA error 2)" in said and "5 GB/s, not 25" in said and "ulimit -l" in said


def test_a_share_of_pageable_memory_costs_its_share(checkpoint: Path) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True), gpu=True)
    half = slowed_by_pageable(plan, 0.5).predicted.decode_stages["h2d"]
    whole, none = (slowed_by_pageable(plan, share).predicted.decode_stages["h2d"] for share in (1.0, 0.0))
    assert whole == pytest.approx(plan.predicted.decode_stages["h2d"]) and half == pytest.approx((whole + none) / 2)
    unknown = replace(plan, hardware=replace(plan.hardware, gpu=replace(plan.hardware.gpu, h2d_pageable_gbps=0.0)))
    assert slowed_by_pageable(unknown, 0.0) is unknown


# A GPU whose memory runs out


def card(monkeypatch: pytest.MonkeyPatch, free: int, total: int, reserved: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: reserved)


@pytest.mark.parametrize("moment", ["rehearsal", "load", "decode"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nTried"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED at")])
def test_vram_that_runs_out_in_the_middle_is_one_line_with_the_budget_and_what_is_free(
    on_a_card: Desk, monkeypatch: pytest.MonkeyPatch, moment: str, error: Exception
) -> None:
    card(monkeypatch, free=123 * MIB, total=8 << 30, reserved=2 << 30)
    fails_at(monkeypatch, moment, error)
    line = on_a_card.refusal()
    assert f"hardware.vram_bytes={8 << 30}" in line and "129 MB of the card's" in line


def test_the_remedy_for_vram_that_a_neighbour_took_is_another_than_for_a_plan_that_was_short(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True), gpu=True)
    for free, remedy in ((MIB, "end the other process or solve again with hardware.vram_bytes="), (4 << 30, "workload.vram_guard_bytes=")):
        card(monkeypatch, free=free, total=8 << 30)
        with pytest.raises(UserError, match=remedy) as told, told_when_vram_runs_out(plan, CPU):
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert "\n" not in str(told.value)


def test_other_errors_keep_their_own_words(checkpoint: Path) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True), gpu=True)
    with pytest.raises(RuntimeError, match="shapes differ"), told_when_vram_runs_out(plan, CPU):
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize(
    ("free", "total", "said"), [(1 << 30, 4 << 30, "more than the card's"), (1 << 10, 16 << 30, "end the other process")]
)
def test_a_plan_larger_than_the_card_or_than_what_is_free_of_it_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, free: int, total: int, said: str
) -> None:
    card(monkeypatch, free, total)
    with pytest.raises(UserError, match=said):
        refuse_if_short(plan_for(checkpoint, decisions(gpu=True), gpu=True), torch.device("cuda", 0))


def fails_at(monkeypatch: pytest.MonkeyPatch, moment: str, error: BaseException) -> None:
    """``error`` comes at that moment of a run: while the first pass is rehearsed, while VRAM is filled, at the third token."""
    before(monkeypatch, moment, lambda: raise_(error))


def raise_(error: BaseException) -> None:
    raise error


def before(monkeypatch: pytest.MonkeyPatch, moment: str, act: Callable[[], None]) -> None:
    """``act`` is called on the main thread at ``moment`` of a run."""
    owner, name, count = {
        "arena": (arena_module.Arena, "_fault_in", 1),
        "binding": (Engine, "_bind_fixtures", 1),
        "rehearsal": (Sequences, "prefill", 1),
        "load": (runtime.engine.Filler, "run", 1),
        "prefill": (Sequences, "prefill", 2),
        "decode": (Sequences, "step", 3),
        "report": (json, "dumps", 1),
    }[moment]
    real, calls = getattr(owner, name), []

    def wrapped(*args: Any, **keys: Any) -> Any:
        calls.append(None)
        if len(calls) == count:
            act()
        return real(*args, **keys)

    monkeypatch.setattr(owner, name, wrapped)


# An SSD that slows down


def slowing(after: int, seconds: float) -> Callable[[int, Sequence[memoryview], int], int]:
    reads = []

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        if after <= len(reads) < after + 3:
            time.sleep(seconds)
        return os.preadv(fd, views, offset)

    return preadv


def test_a_run_on_a_drive_that_slows_down_goes_on_and_names_the_stall(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = desk(tmp_path, plan_for(checkpoint, decisions(pages=8)))
    usual = here.run()
    capsys.readouterr()
    monkeypatch.setattr(runtime.engine, "ReadPool", partial(ReadPool, preadv=slowing(40, 0.2)))
    report = here.run()
    stalls = report["stalls"]
    assert report["tokens"] == usual["tokens"]
    assert stalls["count"] >= 3 and stalls["longest_s"] >= 0.2 > stalls["median_s"] and stalls["lost_s"] >= 0.5
    assert Path(stalls["file"]).parent == checkpoint and stalls["offset"] >= 0 and stalls["when"]
    assert f"at offset {stalls['offset']} of {stalls['file']}" in capsys.readouterr().out.replace("\n", " ")


def test_stalls_are_counted_against_the_median_of_all_reads() -> None:
    stalls = Stalls()
    for _ in range(3 * ENOUGH):
        stalls.note(0.004, Path("a"), 0)
    for seconds in (0.02, 0.05, 0.031):
        stalls.note(seconds, Path("slow"), 4096)
    facts = stalls.facts()
    assert facts == facts | {"count": 1, "longest_s": 0.05, "file": "slow", "offset": 4096}
    assert facts["median_s"] == pytest.approx(0.004, rel=0.1) and facts["lost_s"] == pytest.approx(0.046, rel=0.1)


def test_a_few_reads_or_short_ones_make_no_stall() -> None:
    stalls = Stalls()
    stalls.note(5.0, Path("first"), 0)
    for _ in range(3 * ENOUGH):
        stalls.note(1e-5, Path("a"), 0)
    stalls.note(0.9 * LEAST_S, Path("a"), 0)
    assert stalls.facts()["count"] == 0 and stalls.facts()["file"] is None


# Signals


@pytest.fixture
def endless(checkpoint: Path, tmp_path: Path) -> Desk:
    return desk(tmp_path, plan_for(checkpoint, decisions(pages=4096, prefill_chunk_tokens=64), work=workload(new_tokens=60_000)))


def runtime_main(here: Desk, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit status of `runtime run` in this process."""
    monkeypatch.setattr(sys, "argv", ["runtime", "run", f"plan={here.plan}", f"out={here.out}"])
    with pytest.raises(SystemExit) as ended:
        PROGRAM.main()
    return ended.value.code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["arena", "binding", "rehearsal", "load", "prefill", "decode", "report"])
def test_a_signal_at_any_moment_leaves_no_thread_no_page_lock_and_no_file(
    on_a_card: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moment: str, number: int
) -> None:
    copier = LockingCopier()
    put_in(monkeypatch, copier)
    before(monkeypatch, moment, lambda: os.kill(os.getpid(), number))
    usual = signal.getsignal(number)
    with leaves_nothing_behind(on_a_card.plan.parent):
        status = runtime_main(on_a_card, monkeypatch)
    ended = (130, "runtime: interrupted\n") if number == signal.SIGINT else (143, "runtime: terminated\n")
    assert (status, capsys.readouterr().err) == ended
    assert not copier.held and signal.getsignal(number) == usual


@pytest.mark.parametrize("after_s", [0.0, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4])
def test_a_signal_after_any_time_leaves_nothing(endless: Desk, monkeypatch: pytest.MonkeyPatch, after_s: float) -> None:
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM))
    before(monkeypatch, "arena", timer.start)
    with leaves_nothing_behind(endless.plan.parent):
        status = runtime_main(endless, monkeypatch)
        timer.join()
    assert status == 143


WATCHED = """
import atexit, sys, threading
atexit.register(lambda: print('threads:', *(t.name for t in threading.enumerate() if t is not threading.main_thread()), flush=True))
from runtime.cli import main
sys.argv[0] = 'runtime'
main()
"""


@pytest.mark.parametrize("said", ["loaded layer", "evict"])
def test_a_process_that_is_terminated_ends_with_status_143_and_no_thread_alive(endless: Desk, tmp_path: Path, said: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, "run", f"plan={endless.plan}", "verbose=true", f"out={endless.out}"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    try:
        assert any(said in line for line in process.stdout), process.stderr.read()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (143, "runtime: terminated\n")
    assert out.splitlines()[-1].strip() == "threads:"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


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


def test_a_signal_while_something_is_taken_is_heard_right_after() -> None:
    taken = []
    with pytest.raises(Terminated), terminate_as_interrupt():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            taken.append(True)
        taken.append(False)
    assert taken == [True]


def test_a_signal_that_was_ignored_from_the_start_stays_ignored() -> None:
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with terminate_as_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)


# An engine that fails while it is made


STAGES = ["ReadPool", "make_policy", "VramPool", "VramRing", "RingStream", "Rehearsal", "Binder", "BlockedHead", "move_buffers"]


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_fails_while_it_is_made_gives_everything_back(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError(stage)

    copier, threads = LockingCopier(), set(threading.enumerate())
    monkeypatch.setattr(runtime.engine, stage, fail)
    with pytest.raises(MemoryError, match=stage):
        Engine(plan_for(checkpoint, decisions(gpu=True), gpu=True), open_skeleton(checkpoint), copier, CPU, EngineOptions())
    assert not copier.held and set(threading.enumerate()) <= threads


def test_an_arena_that_cannot_be_had_names_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"lower hardware\.dram_bytes"):
        Arena(1 << 62)


# What a run takes of the card


class Nvml:
    """``pynvml`` with these processes on the card."""

    class NVMLError(Exception):
        pass

    def __init__(self, *processes: tuple[int, int | None]):
        self._running = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == "GPU-1"
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, card: str) -> list[SimpleNamespace]:
        return self._running


@pytest.mark.parametrize(
    ("processes", "bytes_"),
    [
        ([(os.getpid(), 5), (1, 7)], 5),
        ([(4_000_000, 7)], 7),
        ([(4_000_000, 7), (4_000_001, 8)], None),
        ([(os.getpid(), None)], None),
        ([], None),
    ],
)
def test_vram_of_this_process_is_told_apart_from_its_neighbours(processes: list[tuple[int, int | None]], bytes_: int | None) -> None:
    nvml = Nvml(*processes)
    assert process_vram_bytes("1", nvml) == process_vram_bytes("GPU-1", nvml) == bytes_ and nvml.open == 0


@pytest.fixture
def fake_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    state = {"allocated": 3 << 30, "reserved": 4 << 30, "held": 5 << 30, "segments": 7}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: state["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: state["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: state["reserved"])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_device_alloc": state["segments"]})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr("runtime.cuda.process_vram_bytes", lambda uuid: state["held"] or None)
    yield state


def test_the_peak_counts_the_context_as_it_is_and_allocations_since_the_warm_up(checkpoint: Path, fake_card: dict[str, int]) -> None:
    plan, device = plan_for(checkpoint, decisions(gpu=True), gpu=True), torch.device("cuda", 0)
    watch = VramWatch(plan, device)
    assert watch.peak_bytes() == 4 << 30 and watch.facts()["allocations_after_warmup"] == 0
    fake_card["segments"] += 2
    facts = watch.facts()
    assert facts["allocations_after_warmup"] == 2
    assert facts["vram"] == facts["vram"] | {"context_bytes": 1 << 30, "context_measured": True, "reserved_bytes": 4 << 30}
    fake_card["held"] = 0
    assert context_bytes(device) is None and watch.peak_bytes() == 3 << 30, "the plan's figure (0) where NVML is silent"
    assert not watch.facts()["vram"]["context_measured"]


def test_without_a_card_there_is_nothing_to_watch(checkpoint: Path) -> None:
    watch = VramWatch(plan_for(checkpoint, decisions()), CPU)
    assert watch.peak_bytes() == 0 and watch.facts() == {}
