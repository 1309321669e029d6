"""On a real card: prompts whose layers are recorded around attention say what launched ones say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.coded_synth import config_of, write_coded
from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.memory.device import CudaDevice
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

CARD = torch.device("cuda", 0)
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=12, chunk_tokens=1 << 20)
LONGER, SHORT = replace(BATCH, prompts=[[7, 8], [9] * 26, [1, 2, 3]]), replace(BATCH, prompts=[[7], [9], [1, 2, 3]])
TOKENS = 32
"""More than all prompts of a batch have, and less than twice as many; of ``SHORT`` it is more."""


def generated(checkpoint: Path, tokens: int, layers: int = 6) -> tuple[list[Generation], dict[str, Any] | None]:
    made = decisions(gpu=True, resident=(layers, layers, 1), embedding=Tier.vram, cap=0, hwm=3, distance=0)
    plan = plan_for(checkpoint, replace(made, recorded_prompt_tokens=tokens), gpu=True)
    with opened(plan, checkpoint, CudaDevice(0), CARD) as session:
        session.load(BATCH)
        found = [session.generate(one, Sampler(Sampling(), CARD), keep_logits=True) for one in (BATCH, LONGER, SHORT, BATCH)]
        assert found[0].tokens == found[3].tokens
        facts: dict[str, Any] | None = session.engine.facts()["prompts"]
        return found, facts


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "phi3"])
def test_recorded_prompts_say_what_their_kernels_say(tmp_path: Path, model_type: str) -> None:
    checkpoint = save_tiny(tmp_path, model_type)
    wanted, none = generated(checkpoint, 0)
    found, facts = generated(checkpoint, TOKENS)
    assert none is None and facts == {"tokens": TOKENS, "refused": None, "layers": 3 * 6}
    alike(found, wanted)


@pytest.mark.parametrize("coding", ["int4", "fp8"])
def test_coded_matrices_are_decoded_in_recorded_pieces(tmp_path: Path, coding: str) -> None:
    write_coded(coding, config_of("demo", 3), tmp_path / "coded")
    wanted, _ = generated(tmp_path / "coded", 0, 3)
    found, facts = generated(tmp_path / "coded", TOKENS, 3)
    assert facts == {"tokens": TOKENS, "refused": None, "layers": 3 * 3}
    alike(found, wanted)


def alike(found: list[Generation], wanted: list[Generation]) -> None:
    """The first logits of each batch."""
    for ours, theirs in zip(found, wanted, strict=True):
        first, right = ours.logits[0].float(), theirs.logits[0].float()
        assert torch.allclose(first, right, atol=0.02 * right.abs().max().item(), rtol=0)
