"""KV outside the compute device: the same logits wherever it lies, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import KvPages
from penstock.planner.contract.decided.kv_tiers import kv_tiers
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.engine.passes.generate import Batch, Generation, generate
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.engine.session import Session
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import kinds
from tests.runtime.sessions import opened
from tests.support import HostCopier, decisions, plan_for, save_tiny, workload

CPU = torch.device("cpu")
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3, 4, 5]], max_new_tokens=9, chunk_tokens=1 << 20)
LONG = replace(BATCH, prompts=[list(range(3, 40)), list(range(50, 91))], chunk_tokens=7)
A_LAYER = 16
"""Pages: 16 sequences of 64 tokens would fit."""
ON_CARD = {
    "half in DRAM": (3, 3, 0), "all in DRAM": (0, 6, 0), "one in DRAM": (5, 1, 0), "all tiers": (1, 2, 3), "all on SSD": (0, 0, 6),
    "SSD and VRAM": (2, 0, 4), "two": (4, 1, 1),
}  # fmt: skip
ON_HOST = {"all on SSD": (0, 0, 6), "one on SSD": (0, 5, 1), "most on SSD": (0, 2, 4)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"))


def _plan(checkpoint: Path, layers: tuple[int, int, int], gpu: bool, **made: object) -> Plan:
    plan = plan_for(checkpoint, decisions(gpu=gpu, **made), gpu, workload(kv_spill=True))
    kv = KvPages(64, *(count * A_LAYER for count in layers))
    spilled = replace(plan.decisions, kv=kv)
    return replace(plan, decisions=spilled, prediction=predict(plan.hardware, plan.model, plan.workload, spilled))


def _session(plan: Plan, checkpoint: Path, gpu: bool) -> AbstractContextManager[Session]:
    return opened(plan, checkpoint, HostCopier() if gpu else None)


def _expect(checkpoint: Path, batch: Batch) -> Generation:
    return _said(checkpoint, tuple(map(tuple, batch.prompts)), batch.max_new_tokens, batch.chunk_tokens)


@cache
def _said(checkpoint: Path, prompts: tuple[tuple[int, ...], ...], max_new_tokens: int, chunk_tokens: int) -> Generation:
    """What the whole model says, once a checkpoint."""
    batch = Batch([*map(list, prompts)], max_new_tokens, chunk_tokens)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    pool = KvPool(A_LAYER, 64, kinds(model.config), CPU)
    return generate(Stepper(model, CPU, pool), batch, Sampler(Sampling(), CPU), keep_logits=True)


def _check(session: Session, checkpoint: Path, *batches: Batch) -> None:
    session.load(batches[0])
    for batch in batches:
        got = session.generate(batch, Sampler(Sampling(), CPU), keep_logits=True)
        want = _expect(checkpoint, batch)
        assert got.tokens == want.tokens
        for a, b in zip(got.passes, want.passes, strict=True):
            assert torch.equal(a.logits, b.logits)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("case", ON_CARD)
def test_three_tiers_of_kv_give_the_unstreamed_logits(checkpoint: Path, case: str) -> None:
    plan = _plan(checkpoint, ON_CARD[case], True, resident=(1, 2, 0))
    with _session(plan, checkpoint, True) as session:
        _check(session, checkpoint, BATCH, replace(BATCH, prompts=BATCH.prompts[1:]), LONG)
        totals = session.engine.stage_totals()
    outside = sum(count for count in ON_CARD[case][1:])
    assert totals["d2h"][0] and totals["h2d"][0], f"{outside} layers moved"


@pytest.mark.parametrize("case", ON_HOST)
def test_two_tiers_of_kv_give_the_unstreamed_logits(checkpoint: Path, case: str) -> None:
    with _session(_plan(checkpoint, ON_HOST[case], False), checkpoint, False) as session:
        _check(session, checkpoint, LONG, BATCH)
        assert session.engine.stage_totals()["ssd_write"][0]


@pytest.fixture(scope="module", params=["gemma2", "gemma3_text", "mistral", "qwen3", "mixtral"])
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp(request.param), request.param, request.param.startswith("gemma"), sliding_window=8)


@pytest.mark.parametrize("gpu", [False, True])
def test_sliding_windows_stream(windowed: Path, gpu: bool) -> None:
    plan = _plan(windowed, (1, 2, 3) if gpu else (0, 1, 5), gpu)
    with _session(plan, windowed, gpu) as session:
        _check(session, windowed, LONG, BATCH)


def test_a_batch_broken_off_leaves_the_next_one_right(checkpoint: Path) -> None:
    with _session(_plan(checkpoint, (1, 2, 3), True), checkpoint, True) as session:
        session.load(LONG)

        def break_off(phase: str, done: int, total: int) -> None:
            if phase == "decode" and done == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.generate(LONG, Sampler(Sampling(), CPU), progress=break_off)
        for batch in (BATCH, LONG):
            got = session.generate(batch, Sampler(Sampling(), CPU))
            assert got.tokens == _expect(checkpoint, batch).tokens


def test_no_room_for_the_scratch_file_is_told_before_anything_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    session = opened(_plan(checkpoint, (0, 0, 6), False), checkpoint, kv_scratch_dir=tmp_path / "missing")
    with pytest.raises(UserError, match="kv.scratch_dir=.*missing.*name another one"), session:
        pass


def test_layers_outside_are_spread_over_a_pass() -> None:
    tiers = "".join(tier[0] for tier in kv_tiers(8, KvPages(64, 4 * 3, 2 * 3, 2 * 3)))
    assert tiers.count("v") == 4 and tiers.count("d") == 2 and tiers.count("s") == 2
    assert "vv" not in tiers and "ds" not in tiers
