"""Page-locking that is refused, wholly or partly: copies are cut or pageable, and the run says what that costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.memory import arena as arena_module
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.device import split_copy
from penstock.runtime.memory.pageable import slowed_by_pageable
from tests.runtime.fakes import LockingCopier
from tests.runtime.faults import put_in
from tests.runtime.running import desk
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny

CPU = torch.device("cpu")
MIB = 1 << 20
KIB = 1 << 10


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_LARGEST_PIECE", 256 * KIB)
    monkeypatch.setattr(arena_module, "_SMALLEST_PIECE", 16 * KIB)


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


BATCH = Batch(prompts=[[5, 9, 200], [17, 250]], max_new_tokens=4, chunk_tokens=1 << 20)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_without_page_locking_logits_are_the_same(tmp_path: Path, model_type: str, small_pieces: None) -> None:
    """The embedding table lies where kernels cannot reach it: its rows are looked up by the CPU."""
    store = save_tiny(tmp_path, model_type, tied=model_type != "llama")
    results = []
    for copier in (LockingCopier(), LockingCopier(0), LockingCopier(1300 * KIB)):
        with opened(plan_for(store, decisions(gpu=True), gpu=True), store, copier) as session:
            session.load(BATCH)
            results.append(session.generate(BATCH, Sampler(Sampling(), CPU), keep_logits=True))
            facts = session.engine.facts()["arena"]
        assert not copier.held
        assert bool(facts["refused"]) == bool(copier.refusals) == (facts["page_locked_bytes"] < facts["bytes"])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0].logits, other.logits, strict=True))


def plan_on_a_free_bus(checkpoint: Path) -> Plan:
    """Copies are not slowed by reads of the SSD, so their predicted seconds are bytes over rate alone."""
    plan = plan_for(checkpoint, decisions(gpu=True, pages=8), gpu=True)
    hardware = replace(plan.hardware, dram_bus_gbps=0.0)
    return replace(plan, hardware=hardware, prediction=predict(hardware, plan.model, plan.workload, plan.decisions))


@pytest.mark.parametrize("most_bytes", [0, 40 * MIB])
def test_a_run_without_page_locking_goes_on_says_what_it_costs_and_predicts_anew(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_pieces: None,
    most_bytes: int,
) -> None:
    here = desk(tmp_path, plan_on_a_free_bus(checkpoint))
    put_in(monkeypatch, LockingCopier())
    usual = here.run(max_new_tokens=3)
    whole = usual["arena"]["bytes"]
    assert usual["arena"] == usual["arena"] | {"refused": None, "page_locked_bytes": whole}
    assert "page-locking" not in capsys.readouterr().out
    put_in(monkeypatch, LockingCopier(most_bytes))
    report = here.run(max_new_tokens=3)
    locked = report["arena"]["page_locked_bytes"]
    assert report["arena"]["refused"] == "CUDA error 2" and most_bytes - 32 * KIB < locked <= most_bytes
    assert report["tokens"] == usual["tokens"]
    slower = report["predicted"]["decode_stages"]["h2d"] / usual["predicted"]["decode_stages"]["h2d"]
    share = locked / whole
    assert slower == pytest.approx(share + (1 - share) * 20 / 5), "the profile's pageable rate for the share that is not locked"
    said = " ".join(capsys.readouterr().out.split())
    assert f"page-locking was refused (CUDA error 2) for {show_bytes(whole - locked)} of {show_bytes(whole)} of DRAM" in said
    assert "5 GB/s, not 25" in said and "ulimit -l" in said


def test_a_share_of_pageable_memory_costs_its_share(checkpoint: Path) -> None:
    plan = plan_on_a_free_bus(checkpoint)
    half = slowed_by_pageable(plan, 0.5).prediction.decode_stages["h2d"]
    whole, none = (slowed_by_pageable(plan, share).prediction.decode_stages["h2d"] for share in (1.0, 0.0))
    assert whole == pytest.approx(plan.prediction.decode_stages["h2d"]) and half == pytest.approx((whole + none) / 2)
    unknown = replace(plan, hardware=replace(plan.hardware, gpu=replace(plan.hardware.gpu, h2d_pageable_gbps=0.0)))
    assert slowed_by_pageable(unknown, 0.0) is unknown
