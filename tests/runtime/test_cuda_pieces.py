"""On a real card: a decode step that is recorded between its layers' experts says what its kernels say one after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import ExpertSlots, Tier
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.memory.device import CudaDevice
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

CARD = torch.device("cuda", 0)
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=24, chunk_tokens=1 << 20, limits=[24, 24, 17])
RESIDENT = {"resident": (6, 6, 1), "embedding": Tier.vram, "cap": 0, "hwm": 3, "distance": 0}


def generate(checkpoint: Path, graphs: bool, prefetch: int, batch: Batch = BATCH, **made: object) -> tuple[list[Generation], dict]:
    plan = plan_for(checkpoint, decisions(gpu=True, **made), True)
    experts = plan.model.experts
    taken = replace(plan.decisions, experts=ExpertSlots(fewest_slots(experts) + 2, experts.units, chunk_bytes=1 << 13, prefetch=prefetch))
    plan = replace(plan, decisions=taken, prediction=predict(plan.hardware, plan.model, plan.workload, taken))
    with opened(plan, checkpoint, CudaDevice(0), CARD, graphs=graphs) as session:
        session.load(batch)
        batches = batch, replace(batch, prompts=[[7, 8], [9] * 33, [1, 2, 3]][: len(batch.prompts)]), batch
        found = [session.generate(batch, Sampler(Sampling(), CARD), keep_logits=True) for batch in batches]
        assert found[0].tokens == found[2].tokens
        facts = session.engine.facts()
        stages = session.engine.stage_totals()
        session.engine.stop()
        assert min(session.engine.rehearse(batch)) > 0
        return found, facts | {"stages": stages}


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_step_in_pieces_says_what_its_kernels_say(tmp_path: Path, model_type: str, prefetch: int) -> None:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8} if model_type == "gpt_oss" else {}
    checkpoint = save_tiny(tmp_path, model_type, **more)
    wanted, without = generate(checkpoint, False, prefetch, **RESIDENT)
    found, facts = generate(checkpoint, True, prefetch, **RESIDENT)
    assert {"rows": 3, "refused": None, "steps": 48, "pieces": 7}.items() <= facts["graphs"].items() and without["graphs"] is None
    assert facts["experts"]["vram"]["misses"] > 0 and facts["stages"]["h2d"][1] > 0 and facts["stages"]["compute"][1] > 0
    for got, want in zip(found, wanted, strict=True):
        assert got.tokens == want.tokens
        for a, b in zip(got.logits, want.logits, strict=True):
            assert torch.allclose(a.float(), b.float(), atol=0.02 * b.abs().max().item(), rtol=0)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_one_rows_experts_are_one_launch(tmp_path: Path, model_type: str, prefetch: int) -> None:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8} if model_type == "gpt_oss" else {}
    checkpoint, batch = save_tiny(tmp_path, model_type, **more), replace(BATCH, prompts=BATCH.prompts[:1], limits=[24])
    wanted, _ = generate(checkpoint, False, prefetch, batch, **RESIDENT)
    found, facts = generate(checkpoint, True, prefetch, batch, **RESIDENT)
    assert {"rows": 1, "refused": None, "pieces": 13}.items() <= facts["graphs"].items()
    assert facts["graphs"]["visits"] == 6 * facts["graphs"]["steps"] > 0 and facts["experts"]["vram"]["misses"] > 0
    for got, want in zip(found, wanted, strict=True):
        assert_alike(got, want)


def assert_alike(got: Generation, want: Generation) -> None:
    """Another kernel's sums are rounded otherwise, and random models have close seconds: as far as both said the same, and one more."""
    alike = next((k for k, (a, b) in enumerate(zip(got.tokens[0], want.tokens[0], strict=True)) if a != b), len(got.tokens[0]) - 1)
    assert alike > 0, "the prompt's own token"
    for a, b in zip(got.logits[: alike + 1], want.logits[: alike + 1], strict=True):
        assert torch.allclose(a.float(), b.float(), atol=0.03 * b.abs().max().item(), rtol=0)


def test_units_that_stream_between_experts_are_launched(tmp_path: Path) -> None:
    _, facts = generate(save_tiny(tmp_path, "mixtral"), True, 0, resident=(1, 2, 0), head_blocks=2)
    assert facts["graphs"] is None
