"""Streamed logits are those of the unstreamed model, bit for bit on the CPU, whatever the plan."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.contract.decided.decisions import CachePolicy, Tier
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.session import Session
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250]], max_new_tokens=6, chunk_tokens=1 << 20)
TIED = ("gemma2", "gemma3_text", "llama")
MODELS = [("llama", False), ("qwen3", False), ("mistral", False), ("mixtral", False), ("qwen3_moe", False), *((m, True) for m in TIED)]

TWO_TIERS = {
    "pinned": {},
    "rolling": {"policy": CachePolicy.rolling, "cap": 1, "hwm": 4, "distance": 3},
    "nothing kept": {"cap": 0, "hwm": 3, "distance": 2},
    "all in DRAM": {"cap": 6, "hwm": 9, "distance": 6},
}
THREE_TIERS = {
    "all streamed": {},
    "some resident": {"resident": (3, 2, 0), "embedding": Tier.vram},
    "head in blocks": {"resident": (1, 4, 1), "head_blocks": 3, "slots": 6, "vram_distance": 3},
    "only attention resident": {"resident": (6, 0, 0), "slots": 4},
    "one slot for FFN": {"resident": (2, 1, 0), "head_blocks": 3, "ffn_slots": 1},
    "rolling": {"policy": CachePolicy.rolling, "cap": 1, "hwm": 4, "distance": 3, "resident": (1, 1, 1)},
    "all in VRAM": {"resident": (6, 6, 1), "embedding": Tier.vram, "cap": 0, "hwm": 3, "distance": 0},
}


def _run(session: Session, batch: Batch = BATCH) -> Generation:
    session.load(batch)
    return session.generate(batch, Sampler(Sampling(), CPU), keep_logits=True)


def _expect(checkpoint: Path, batch: Batch = BATCH) -> Generation:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    return said(model, batch)


def _same(got, want) -> None:
    assert got.tokens == want.tokens
    for a, b in zip(got.logits, want.logits, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def unstreamed(checkpoint: Path) -> Generation:
    return _expect(checkpoint)


@pytest.mark.parametrize("case", TWO_TIERS)
def test_two_tiers_give_the_unstreamed_logits(checkpoint: Path, unstreamed: Generation, case: str) -> None:
    with opened(plan_for(checkpoint, decisions(**TWO_TIERS[case])), checkpoint) as session:
        _same(_run(session), unstreamed)
        assert session.engine.dram.cache.stats.peak_layers <= session.engine.dram.slots


@pytest.mark.parametrize("case", THREE_TIERS)
def test_three_tiers_give_the_unstreamed_logits(checkpoint: Path, unstreamed: Generation, case: str) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True, **THREE_TIERS[case]), gpu=True)
    with opened(plan, checkpoint, HostCopier()) as session:
        _same(_run(session), unstreamed)


@pytest.mark.parametrize(("model_type", "tied"), MODELS)
@pytest.mark.parametrize("gpu", [False, True])
def test_every_supported_decoder_streams(tmp_path: Path, model_type: str, tied: bool, gpu: bool) -> None:
    checkpoint = save_tiny(tmp_path, model_type, tied, shard="300KB")
    made = decisions(gpu=gpu, resident=(2, 1, 0), head_blocks=2 if gpu else 1)
    with opened(plan_for(checkpoint, made, gpu), checkpoint, HostCopier() if gpu else None) as session:
        _same(_run(session), _expect(checkpoint))


def test_closing_in_the_middle_leaves_no_thread(checkpoint: Path) -> None:
    before = set(threading.enumerate())
    with opened(plan_for(checkpoint, decisions(gpu=True), gpu=True), checkpoint, HostCopier()) as session:
        session.load(BATCH)
    assert set(threading.enumerate()) <= before


def test_without_a_card_a_session_computes_with_the_threads_that_the_probe_found_fastest(checkpoint: Path) -> None:
    before, plan = torch.get_num_threads(), plan_for(checkpoint, decisions())
    plan = replace(plan, hardware=replace(plan.hardware, cpu_threads=before + 1))
    with opened(plan, checkpoint):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
