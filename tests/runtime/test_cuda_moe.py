"""Experts that stream to a card: what is said is what a model with all of them says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import ExpertPolicyName, ExpertSlots
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.experts.expert_forward import WholeExperts
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.cuda import open_cuda
from penstock.runtime.store.decoder import decoder_layers
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.runtime.whole_experts import take_over
from tests.support import decisions, plan_for, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

BATCH = Batch(prompts=[list(range(3, 43)), list(range(50, 90)), [7]], max_new_tokens=24, chunk_tokens=16)
CASES = {"few, all": (0.0, 1.0), "few, few": (0.0, 0.0), "half, half": (0.5, 0.5), "all, none": (1.0, -1.0), "all, all": (1.0, 1.0)}


def plan_with(checkpoint: Path, vram: float, dram: float, **more: object) -> Plan:
    """Slots as shares of all experts; as few as there may be for 0, none for -1."""
    plan = plan_for(checkpoint, decisions(gpu=True, resident=(1, 2, 0), head_blocks=2), True)
    experts = plan.model.experts
    slots = (0 if share < 0 else max(fewest_slots(experts), round(share * experts.units)) for share in (vram, dram))
    made = replace(plan.decisions, experts=ExpertSlots(*slots, chunk_bytes=1 << 13, **more))
    return replace(plan, decisions=made, prediction=predict(plan.hardware, plan.model, plan.workload, made))


def streamed(checkpoint: Path, plan: Plan) -> tuple[Generation, dict]:
    device = torch.device("cuda", 0)
    with opened(plan, checkpoint, open_cuda(Budget.of(plan), device), device) as session:
        session.load(BATCH)
        made = session.generate(BATCH, Sampler(Sampling(), device), keep_logits=True)
        return made, session.engine.facts()["experts"]


def whole(checkpoint: Path) -> Generation:
    """The unstreamed model, its experts computed by the same function: transformers' own kernels for them round in another order."""
    device = torch.device("cuda", 0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device).eval()
    take_over(model, WholeExperts(decoder_layers(model)))
    return said(model, BATCH, device)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_tokens_are_those_of_a_model_that_has_all_experts(tmp_path: Path, model_type: str, case: str, prefetch: int) -> None:
    checkpoint = save_tiny(tmp_path, model_type)
    got, facts = streamed(checkpoint, plan_with(checkpoint, *CASES[case], prefetch=prefetch))
    want = whole(checkpoint)
    assert got.tokens == want.tokens
    assert facts["vram"]["hits"] > 0 or case == "few, few"  # where nothing is kept
    assert max((a - b).abs().max().item() for a, b in zip(got.logits, want.logits, strict=True)) == 0


@pytest.mark.parametrize("policy", list(ExpertPolicyName))
def test_no_policy_changes_what_is_said(tmp_path: Path, policy: ExpertPolicyName) -> None:
    checkpoint = save_tiny(tmp_path, "mixtral")
    got, _ = streamed(checkpoint, plan_with(checkpoint, 0.4, 0.5, policy=policy, prefetch=1))
    assert got.tokens == whole(checkpoint).tokens
