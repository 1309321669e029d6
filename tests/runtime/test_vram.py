"""VRAM that is short or runs out: one line with the budget and what is free; what a run takes of the card is counted."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.planner.common.errors import UserError
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.cuda import SPARE, UNCHARGED, VramWatch, context_bytes, missing_bytes, process_vram_bytes, told_in_one_line
from penstock.runtime.tools import run as running
from tests.runtime.fakes import LockingCopier
from tests.runtime.faults import fails_at, put_in
from tests.runtime.running import Desk
from tests.support import decisions, plan_for

CPU = torch.device("cpu")
MIB = 1 << 20


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


@pytest.mark.parametrize("moment", ["rehearsal", "load", "decode"])
def test_a_card_that_fails_in_the_middle_is_one_line_that_names_it(on_a_card: Desk, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    fails_at(monkeypatch, moment, torch.AcceleratorError("CUDA error: unspecified launch failure\nFor debugging consider"))
    assert on_a_card.refusal().startswith("GPU 3 failed (CUDA error: unspecified launch failure); run it again")


def test_a_card_on_which_not_even_a_context_is_to_be_had_is_one_line(on_a_card: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: out of memory\nSearch for")

    monkeypatch.setattr("penstock.runtime.memory.cuda.find_device", lambda plan, number=0: torch.device("cuda", 0))
    monkeypatch.setattr("penstock.runtime.memory.cuda.free_vram_of", lambda number: 123 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", full)
    line = on_a_card.refusal()
    assert "GPU 0 has 129 MB free and refuses this process a context (CUDA error: out of memory); end the other process" in line


class Exhausted(LockingCopier):
    """A card that has no memory left from its ``n``-th copy on, whichever thread asks."""

    def __init__(self, n: int):
        super().__init__()
        self._left = n

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._left -= 1
        if self._left <= 0:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
        super().copy(dst, src)


@pytest.mark.parametrize("n", [1, 2, 7, 40, 200])
def test_vram_that_runs_out_at_any_copy_is_one_line(on_a_card: Desk, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    card(monkeypatch, free=123 * MIB, total=8 << 30, reserved=2 << 30)
    copier = Exhausted(n)
    put_in(monkeypatch, copier)
    assert "VRAM ran out: hardware.vram_bytes=" in on_a_card.refusal(max_new_tokens=100)
    assert not copier.held


class Kernels(TorchDispatchMode):
    """Counts kernels that this thread launches; from the ``n``-th on there is no memory left."""

    def __init__(self, n: float = math.inf):
        super().__init__()
        self.launched = 0
        self._n = n

    def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), keys: Any = None) -> Any:
        self.launched += 1
        if self.launched >= self._n:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nGPU 0 has")
        return kernel(*args, **(keys or {}))


def test_vram_that_runs_out_at_any_kernel_is_one_line(on_a_card: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, free=123 * MIB, total=8 << 30, reserved=2 << 30)
    real = running._stream

    def within(mode: Kernels) -> None:
        def stream(*args: Any) -> Any:
            with mode:
                return real(*args)

        monkeypatch.setattr(running, "_stream", stream)

    within(counting := Kernels())
    on_a_card.run(max_new_tokens=3)
    on_a_card.out.unlink()
    assert counting.launched > 1000
    for n in random.Random(1).sample(range(1, counting.launched), 12):
        copier = LockingCopier()
        put_in(monkeypatch, copier)
        within(Kernels(n))
        line = on_a_card.refusal(max_new_tokens=3)
        assert f"VRAM ran out: hardware.vram_bytes={8 << 30}" in line and "129 MB of the card's" in line, n
        assert not copier.held


def test_the_remedy_for_vram_that_a_neighbour_took_is_another_than_for_a_plan_that_was_short(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True), gpu=True)
    for free, remedy in ((MIB, "end the other process or solve again with hardware.vram_bytes="), (4 << 30, "workload.vram_guard_bytes=")):
        card(monkeypatch, free=free, total=8 << 30)
        with pytest.raises(UserError, match=remedy) as told, told_in_one_line(Budget.of(plan), CPU):
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert "\n" not in str(told.value)


def test_other_errors_keep_their_own_words(checkpoint: Path) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True), gpu=True)
    with pytest.raises(RuntimeError, match="shapes differ"), told_in_one_line(Budget.of(plan), CPU):
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize(
    ("free", "total", "said"), [(1 << 30, 4 << 30, "more than the card's"), (1 << 10, 16 << 30, "end the other process")]
)
def test_a_plan_larger_than_the_card_or_than_what_is_free_of_it_is_refused_before_anything_is_taken(
    on_a_card: Desk, monkeypatch: pytest.MonkeyPatch, free: int, total: int, said: str
) -> None:
    monkeypatch.setattr("penstock.runtime.memory.cuda.find_device", lambda plan, number=0: torch.device("cuda", 0))
    monkeypatch.setattr("penstock.runtime.memory.cuda.open_cuda", lambda plan, device: pytest.fail("the card was opened"))
    card(monkeypatch, free, total)
    assert said in on_a_card.refusal()


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
    monkeypatch.setattr("penstock.runtime.memory.cuda.process_vram_bytes", lambda uuid: state["held"] or None)
    yield state


def test_the_peak_counts_the_context_as_it_is_and_allocations_since_the_warm_up(checkpoint: Path, fake_card: dict[str, int]) -> None:
    plan, device = plan_for(checkpoint, decisions(gpu=True), gpu=True), torch.device("cuda", 0)
    watch = VramWatch(Budget.of(plan), device)
    assert watch.peak_bytes() == 4 << 30 and watch.facts()["allocations_after_warmup"] == 0
    fake_card["segments"] += 2
    facts = watch.facts()
    assert facts["allocations_after_warmup"] == 2
    assert facts["vram"] == facts["vram"] | {"context_bytes": 1 << 30, "context_measured": True, "reserved_bytes": 4 << 30}
    fake_card["held"] = 0
    assert context_bytes(device) is None and watch.peak_bytes() == 3 << 30, "the plan's figure (0) where NVML is silent"
    assert not watch.facts()["vram"]["context_measured"]


def test_without_a_card_there_is_nothing_to_watch(checkpoint: Path) -> None:
    watch = VramWatch(Budget.of(plan_for(checkpoint, decisions())), CPU)
    assert watch.peak_bytes() == 0 and watch.facts() == {}


@pytest.mark.parametrize(
    ("vram", "limit", "reserved", "free", "found"),
    [
        (16 << 30, 40 << 30, 10 << 30, 60 << 30, (5 << 30) + SPARE),  # room for all
        (16 << 30, (16 << 30) + 7, 10 << 30, 60 << 30, (5 << 30) + 7),  # the user's limit
        (16 << 30, 40 << 30, 10 << 30, (5 << 30) + SPARE + 9, (5 << 30) + 9),  # a card on which others are
        (16 << 30, 40 << 30, 10 << 30, 5 << 30, 5 << 30),  # what is planned is asked for, and told where it is not there
        (16 << 30, 40 << 30, 20 << 30, 60 << 30, SPARE - (5 << 30)),  # reserved already
    ],
)
def test_memory_is_spared_beyond_the_plan_within_the_users_limit_and_beside_others(
    vram: int, limit: int, reserved: int, free: int, found: int
) -> None:
    assert missing_bytes(Budget(0, vram, limit, 0, 0, "a card"), 1 << 30, reserved, free) == found


@pytest.mark.parametrize("guard", [0, 1 << 20, UNCHARGED, 2 * UNCHARGED])
@pytest.mark.parametrize("beyond", [0, 7, SPARE // 2])
def test_what_the_driver_takes_unseen_stays_within_the_limit(guard: int, beyond: int) -> None:
    """Where the plan's guard leaves room for it."""
    planned, context = 6 << 30, 1 << 30
    budget = Budget(0, planned, planned + beyond, 0, guard, "a card")
    reserved = missing_bytes(budget, context, 0, 60 << 30)
    assert reserved + context + min(UNCHARGED, guard) == planned + beyond
