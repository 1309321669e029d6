"""Streamed logits are those of the unstreamed model, bit for bit on the CPU, whatever the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.contract.decided.decisions import CachePolicy, Tier
from penstock.runtime.engine.engine import Engine, EngineOptions
from penstock.runtime.engine.generate import Batch, Generation, Sampler, Sampling, Sequences, generate
from penstock.runtime.model.skeleton import open_skeleton
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250]], max_new_tokens=6, capacity=64, chunk_tokens=1 << 20)
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
    "rolling": {"policy": CachePolicy.rolling, "cap": 1, "hwm": 4, "distance": 3, "resident": (1, 1, 1)},
    "all in VRAM": {"resident": (6, 6, 1), "embedding": Tier.vram, "cap": 0, "hwm": 3, "distance": 0},
}


def _generate(model: torch.nn.Module, begin_pass: Callable[[], None], batch: Batch) -> Generation:
    return generate(Sequences(model, CPU, batch, begin_pass), batch, Sampler(Sampling(), CPU), keep_logits=True)


def _run(engine: Engine, batch: Batch = BATCH) -> Generation:
    engine.load(batch, lambda *_: None)
    return _generate(engine.model, engine.stream.begin_pass, batch)


def _expect(checkpoint: Path, batch: Batch = BATCH) -> Generation:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    return _generate(model, lambda: None, batch)


def _same(got, want) -> None:
    assert got.tokens == want.tokens
    for a, b in zip(got.logits, want.logits, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("case", TWO_TIERS)
def test_two_tiers_give_the_unstreamed_logits(checkpoint: Path, case: str) -> None:
    engine = Engine(plan_for(checkpoint, decisions(**TWO_TIERS[case])), open_skeleton(checkpoint), None, CPU, EngineOptions())
    try:
        _same(_run(engine), _expect(checkpoint))
        assert engine.dram.cache.stats.peak_layers <= engine.dram.slots
    finally:
        engine.close()


@pytest.mark.parametrize("case", THREE_TIERS)
def test_three_tiers_give_the_unstreamed_logits(checkpoint: Path, case: str) -> None:
    plan = plan_for(checkpoint, decisions(gpu=True, **THREE_TIERS[case]), gpu=True)
    engine = Engine(plan, open_skeleton(checkpoint), HostCopier(), CPU, EngineOptions())
    try:
        _same(_run(engine), _expect(checkpoint))
    finally:
        engine.close()


@pytest.mark.parametrize(("model_type", "tied"), MODELS)
@pytest.mark.parametrize("gpu", [False, True])
def test_every_supported_decoder_streams(tmp_path: Path, model_type: str, tied: bool, gpu: bool) -> None:
    checkpoint = save_tiny(tmp_path, model_type, tied, shard="300KB")
    made = decisions(gpu=gpu, resident=(2, 1, 0), head_blocks=2 if gpu else 1)
    engine = Engine(plan_for(checkpoint, made, gpu), open_skeleton(checkpoint), HostCopier() if gpu else None, CPU, EngineOptions())
    try:
        _same(_run(engine), _expect(checkpoint))
    finally:
        engine.close()


def test_closing_in_the_middle_leaves_no_thread(checkpoint: Path) -> None:
    before = set(threading.enumerate())
    engine = Engine(plan_for(checkpoint, decisions(gpu=True), gpu=True), open_skeleton(checkpoint), HostCopier(), CPU, EngineOptions())
    engine.load(BATCH, lambda *_: None)
    engine.close()
    assert set(threading.enumerate()) <= before
