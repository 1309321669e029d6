"""On a real card: three tiers give the unstreamed model's logits, and the allocator stays as it was after warm-up."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.contract.decided.decisions import CachePolicy, Tier
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.formats.scratch import Scratch
from penstock.runtime.memory.device import CudaDevice
from tests.runtime.formats.coded_checkpoints import FP8_BLOCKS, coded, fp8_blocks
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import decisions, plan_for, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250]], max_new_tokens=12, chunk_tokens=1 << 20)
CASES = {
    "all streamed": {},
    "some resident": {"resident": (3, 2, 0), "embedding": Tier.vram},
    "head in blocks": {"resident": (1, 4, 1), "head_blocks": 3, "slots": 6, "vram_distance": 3},
    "one slot for FFN": {"resident": (2, 1, 0), "head_blocks": 3, "ffn_slots": 1},
    "rolling": {"policy": CachePolicy.rolling, "cap": 1, "hwm": 4, "distance": 3, "resident": (1, 1, 1)},
    "all in VRAM": {"resident": (6, 6, 1), "embedding": Tier.vram, "cap": 0, "hwm": 3, "distance": 0},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral"])
def test_logits_on_the_card_are_the_unstreamed_models(tmp_path: Path, case: str, model_type: str) -> None:
    device = torch.device("cuda", 0)
    checkpoint = save_tiny(tmp_path, model_type, tied=model_type == "gemma2")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device).eval()
    want = said(model, BATCH, device)
    plan = plan_for(checkpoint, decisions(gpu=True, **CASES[case]), gpu=True)
    with opened(plan, checkpoint, CudaDevice(0), device) as session:
        session.load(BATCH)
        for _ in range(3):
            got = session.generate(BATCH, Sampler(Sampling(), device), keep_logits=True)
            assert got.tokens == want.tokens
            for a, b in zip(got.logits, want.logits, strict=True):
                assert torch.allclose(a.float(), b.float(), atol=0.02 * b.abs().max().item(), rtol=0)


def test_a_twin_tells_the_time_of_an_event_as_the_card_does() -> None:
    card = CudaDevice(0)
    twin, events = card.twin(), [card.compute_event() for _ in range(2)]
    for event in events:
        card.host_waits(event)
    assert [twin.time_of(events[0]), card.time_of(events[1])] == [card.time_of(events[0]), twin.time_of(events[1])]


@pytest.mark.parametrize("case", ["some resident", "all in VRAM"])
def test_a_closed_model_holds_no_vram_while_a_caller_still_has_its_name(tmp_path: Path, case: str) -> None:
    device = torch.device("cuda", 0)
    checkpoint = save_tiny(tmp_path, "llama")
    plan = plan_for(checkpoint, decisions(gpu=True, **CASES[case]), gpu=True)
    with opened(plan, checkpoint, CudaDevice(0), device) as session:
        session.load(BATCH)
        session.generate(BATCH, Sampler(Sampling(), device))
    assert session.engine.card is not None
    held = session.engine.card.vram.nbytes
    before = torch.cuda.memory_allocated(device)
    del session
    gc.collect()
    assert before - torch.cuda.memory_allocated(device) < held / 4


def test_a_closed_model_of_coded_matrices_has_given_back_what_it_decodes_into(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    checkpoint = coded(save_tiny(tmp_path, "llama", hidden_size=128, intermediate_size=256, head_dim=32), fp8_blocks, FP8_BLOCKS)
    plan = plan_for(checkpoint, decisions(gpu=True, **CASES["some resident"]), gpu=True)
    with opened(plan, checkpoint, CudaDevice(0), device) as session:
        session.load(BATCH)
        session.generate(BATCH, Sampler(Sampling(), device))
        scratches = {module.scratch for module in session.engine.model.modules() if isinstance(getattr(module, "scratch", None), Scratch)}
        (scratch,) = scratches
        seen = scratch.of(1, scratch.elements, torch.bfloat16, device)
        assert seen.untyped_storage().nbytes()
    assert not seen.untyped_storage().nbytes()
