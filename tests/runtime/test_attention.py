"""Chunks of a prompt attend as with transformers' own masks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.runtime.engine.generate import Batch, Generation, Sampler, Sampling, Sequences, generate
from penstock.runtime.model import attention
from tests.support import save_tiny

CPU = torch.device("cpu")
BATCH = Batch(prompts=[list(range(3, 43)), list(range(50, 90))], max_new_tokens=6, capacity=64, chunk_tokens=9)


def _said(model: torch.nn.Module, batch: Batch) -> Generation:
    return generate(Sequences(model, CPU, batch, lambda: None), batch, Sampler(Sampling(), CPU), keep_logits=True)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "mixtral", "gemma3_text"])
@pytest.mark.parametrize("batch", [BATCH, replace(BATCH, prompts=[[7, 8, 9], list(range(50, 91))])], ids=["equal", "padded"])
def test_chunks_say_what_they_say_with_masks(tmp_path: Path, model_type: str, batch: Batch) -> None:
    checkpoint = save_tiny(tmp_path, model_type, **({"sliding_window": 16} if model_type in ("mistral", "gemma3_text") else {}))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    want = _said(model, batch)
    attention.use(model)
    got = _said(model, batch)
    assert got.tokens == want.tokens
    worst = max((a - b).abs().max().item() for a, b in zip(got.logits, want.logits, strict=True))
    assert worst < 1e-4


def test_only_chunks_behind_the_cache_go_without_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk and decode steps are transformers' own affair."""
    seen: list[tuple[int, int]] = []
    lower_right = attention.causal_lower_right
    monkeypatch.setattr(attention, "causal_lower_right", lambda q, k: seen.append((q, k)) or lower_right(q, k))
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path, layers=1), dtype=torch.float32).eval()
    attention.use(model)
    _said(model, BATCH)
    assert seen == [(9, 18), (9, 27), (9, 36), (4, 40)]


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_without_flash_attention_nothing_changes(tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path, layers=1), dtype=dtype)
    attention.attend_without_masks(model, torch.device(device))
    assert model.config._attn_implementation == "sdpa"
