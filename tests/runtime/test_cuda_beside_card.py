"""On a real card: a recorded step whose missed experts the CPU shares says what the launched one says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpt_oss_synth import gpt_oss_config, write_gpt_oss
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.memory.device import CudaDevice
from tests.runtime.moe.test_beside_card import plan_of
from tests.runtime.sessions import opened
from tests.support import decisions, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

CARD = torch.device("cuda", 0)
BATCH = Batch(prompts=[[5, 9, 200, 31, 7]], max_new_tokens=24, chunk_tokens=1 << 20)
LAYERS = 3


def gpt_oss(directory: Path) -> Path:
    config = gpt_oss_config({"layers": str(LAYERS), "hidden": "64", "experts": "8", "vocab": "300"})
    write_gpt_oss(config | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}, directory)
    return directory


def said(checkpoint: Path, graphs: bool) -> tuple[list[Generation], dict]:
    plan = plan_of(checkpoint, 1)
    stays = decisions(gpu=True, resident=(LAYERS, LAYERS, 1), embedding=Tier.vram, cap=0, hwm=3, distance=0, experts=plan.decisions.experts)
    plan = replace(plan, decisions=stays, prediction=predict(plan.hardware, plan.model, plan.workload, stays))
    with opened(plan, checkpoint, CudaDevice(0), CARD, graphs=graphs) as session:
        session.load(BATCH)
        made = [session.generate(BATCH, Sampler(Sampling(), CARD), keep_logits=True) for _ in range(2)]
        return made, session.engine.facts()


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_a_recorded_step_has_rows_of_the_cpu(tmp_path: Path, model_type: str) -> None:
    checkpoint = gpt_oss(tmp_path / "oss") if model_type == "gpt_oss" else save_tiny(tmp_path, "mixtral", layers=LAYERS)
    wanted, launched = said(checkpoint, False)
    found, facts = said(checkpoint, True)
    assert launched["graphs"] is None and facts["graphs"]["refused"] is None
    assert facts["graphs"]["visits"] > 0 and facts["experts"]["computed_on_cpu"] > 0, facts["graphs"]
    for got, want in zip(found, wanted, strict=True):
        alike = next((k for k, (a, b) in enumerate(zip(got.tokens[0], want.tokens[0], strict=True)) if a != b), len(got.tokens[0]) - 1)
        assert alike > 0, "the prompt's own token"
        for a, b in zip(got.logits[: alike + 1], want.logits[: alike + 1], strict=True):
            assert torch.allclose(a.float(), b.float(), atol=0.03 * b.abs().max().item(), rtol=0)
