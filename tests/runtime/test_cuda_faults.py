"""Faults on a real card: page-locks that CUDA refuses, VRAM that a neighbour takes, a budget larger than the card."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.memory import arena as arena_module
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.device import CudaDevice
from tests.runtime.faults import before
from tests.runtime.running import Desk, desk
from tests.support import decisions, plan_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

MIB = 1 << 20

NEIGHBOUR = """
import sys, torch
held = []
while (room := torch.cuda.mem_get_info()[0] - 64 * 2**20) > 2**20:
    try:
        held.append(torch.empty(min(room, 2**30), dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        break
print("full", flush=True)
sys.stdin.read()
"""


@contextmanager
def neighbour() -> Iterator[None]:
    """A process that takes all but some 64 MiB of what is free on the card."""
    process = subprocess.Popen([sys.executable, "-c", NEIGHBOUR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "full\n"
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def plan(checkpoint: Path) -> Plan:
    return plan_for(checkpoint, decisions(gpu=True, resident=(1, 1, 0), pages=48), gpu=True)


@pytest.fixture
def there(plan: Plan, tmp_path: Path) -> Desk:
    return desk(tmp_path, plan)


def test_a_lock_that_cuda_refuses_leaves_a_device_that_works() -> None:
    device, arena = CudaDevice(0), Arena(4 * MIB)
    arena.occupy(device)
    try:
        assert arena.locked_bytes == arena.nbytes and arena.refused is None
        assert device.lock(arena.tensor.data_ptr(), arena.nbytes) == "CUDA error 712", "registered already"
        there = torch.zeros(arena.nbytes, dtype=torch.uint8, device="cuda")
        arena.tensor.fill_(7)
        with device.copying():
            device.copy(there, arena.tensor)
        device.host_waits(device.copy_event())
        assert bool((there == 7).all())
    finally:
        arena.close()


@pytest.mark.parametrize("most_bytes", [0, 40 * MIB])
def test_a_run_whose_pages_cannot_all_be_locked_says_the_same_tokens(there: Desk, monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    usual = there.run(max_new_tokens=16)
    assert usual["arena"]["refused"] is None
    monkeypatch.setattr(arena_module, "_LARGEST_PIECE", 256 << 10)
    monkeypatch.setattr(arena_module, "_SMALLEST_PIECE", 16 << 10)
    lock, locked = CudaDevice.lock, []

    def limited(device: CudaDevice, address: int, nbytes: int) -> str | None:
        if sum(locked) + nbytes > most_bytes:  # CUDA's own refusal: of memory that is no memory
            return lock(device, 4096, nbytes)
        locked.append(nbytes)
        return lock(device, address, nbytes)

    monkeypatch.setattr(CudaDevice, "lock", limited)
    report = there.run(max_new_tokens=16)
    arena = report["arena"]
    assert arena["refused"].startswith("CUDA error") and arena["page_locked_bytes"] == sum(locked) <= most_bytes
    assert report["tokens"] == usual["tokens"]
    assert report["predicted"]["decode_stages"]["h2d"] > usual["predicted"]["decode_stages"]["h2d"]


def test_a_neighbour_that_takes_the_card_in_the_middle_does_not_stop_a_run(there: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything was taken before the first token."""
    usual = there.run(max_new_tokens=200)
    taken = neighbour()
    before(monkeypatch, "decode", taken.__enter__)
    try:
        report = there.run(max_new_tokens=200)
    finally:
        taken.__exit__(None, None, None)
    assert report["tokens"] == usual["tokens"] and report["allocations_after_warmup"] == 0


def test_a_plan_for_more_than_a_neighbour_leaves_is_refused_in_one_line(plan: Plan, tmp_path: Path) -> None:
    work = replace(plan.workload, batch=64, prompt_tokens=512)
    larger = replace(plan, workload=work, decisions=decisions(gpu=True, batch=64, pages=64 * 48 * plan.model.layers))
    with neighbour():
        line = desk(tmp_path, larger).refusal(max_new_tokens=100)
    assert "end the other process" in line


def test_vram_that_runs_out_in_the_middle_ends_a_run_in_one_line(there: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.cuda.get_device_properties(0).total_memory
    before(monkeypatch, "decode", lambda: torch.empty(whole, dtype=torch.uint8, device="cuda"))
    assert f"VRAM ran out: hardware.vram_bytes={8 << 30}" in there.refusal(max_new_tokens=16)


def test_a_budget_larger_than_the_card_is_refused(plan: Plan, tmp_path: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    larger = replace(plan, hardware=replace(plan.hardware, vram_bytes=2 * total))
    assert "more than the card's" in desk(tmp_path, larger).refusal()
