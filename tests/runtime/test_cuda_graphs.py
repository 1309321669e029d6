"""On a real card: a decode step of a resident model, recorded as one graph, says what its kernels say one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.engine.generate import Batch, Generation
from penstock.runtime.engine.sampling import Sampler, Sampling
from penstock.runtime.memory.device import CudaDevice
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

CARD = torch.device("cuda", 0)
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=24, chunk_tokens=1 << 20, limits=[24, 9, 17])
RESIDENT = {"resident": (6, 6, 1), "embedding": Tier.vram, "cap": 0, "hwm": 3, "distance": 0}


def generate(checkpoint: Path, graphs: bool) -> tuple[Generation, dict]:
    plan = plan_for(checkpoint, decisions(gpu=True, **RESIDENT), gpu=True)
    with opened(plan, checkpoint, CudaDevice(0), CARD, graphs=graphs) as session:
        session.load(BATCH)
        made = [session.generate(BATCH, Sampler(Sampling(), CARD), keep_logits=True) for _ in range(2)]
        assert made[0].tokens == made[1].tokens
        return made[1], session.engine.facts()


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3"])
def test_a_recorded_step_says_what_its_kernels_say(tmp_path: Path, model_type: str) -> None:
    checkpoint = save_tiny(tmp_path, model_type)
    want, without = generate(checkpoint, graphs=False)
    got, facts = generate(checkpoint, graphs=True)
    assert facts["graphs"] == {"rows": 3, "refused": None} and without["graphs"] is None
    assert got.tokens == want.tokens
    for a, b in zip(got.logits, want.logits, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=0.02 * b.abs().max().item(), rtol=0)


def test_a_model_that_streams_records_nothing(tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path, "llama")
    plan = plan_for(checkpoint, decisions(gpu=True, resident=(3, 3, 1)), gpu=True)
    with opened(plan, checkpoint, CudaDevice(0), CARD) as session:
        session.load(BATCH)
        assert session.engine.facts()["graphs"] is None
