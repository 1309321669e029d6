"""Experts of which every rank has a slice: the words and logits of one process, within rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.plan.planfile import plan_of_text, plan_text
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.company.company import Company
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler
from penstock.runtime.engine.session import Session
from penstock.runtime.experts.expert_forward import ExpertsInTurn
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.ranks.dealt_model import DealtModel
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.ranks.company import dealt_plan, opened
from tests.support import decisions, save_tiny

PROMPTS = (tuple(range(7, 47)), (9, 8, 7), tuple(range(100, 111)))
CASES: dict[str, tuple[int | tuple[int, ...], dict[str, Any], int]] = {
    "mixtral, read again and again": (2, {"model_type": "mixtral", "layers": 5}, 5),
    "layers without experts, all in DRAM": (
        3, {"model_type": "qwen3_moe", "layers": 5, "mlp_only_layers": [1, 4], "moe_intermediate_size": 96}, 12
    ),
    "more layers of one rank": ((3, 1), {"model_type": "mixtral", "layers": 4}, 16),
}  # fmt: skip


def logits(session: Session) -> torch.Tensor:
    """Of each prompt, and of the same tokens one by one behind it: [steps, prompts, vocab]."""
    sampler = Sampler(Sampling(), session.device)
    batch = Batch(PROMPTS, 4, 1 << 20, frozenset())
    session.load(batch, samplers=[sampler])
    return torch.stack([step.float() for step in session.generate(batch, sampler, keep_logits=True).logits])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sliced_experts_give_the_logits_of_one_process(case: tuple[Any, ...], packed: bool, company: Company, tmp_path: Path) -> None:
    dealt, model, slots = case
    checkpoint = save_tiny(tmp_path / "model", **model)
    if packed:
        pack_checkpoint(checkpoint, tmp_path / "packed", None, False, lambda *_: None)
        checkpoint = tmp_path / "packed"
    made, work = decisions(batch=3, pages=32, experts=ExpertSlots(0, slots)), {"batch": 3, "requests": 3}
    with opened(dealt_plan(checkpoint, made, 1, **work), checkpoint, None) as alone:
        want = logits(alone)
    plan = dealt_plan(checkpoint, made, dealt, share=ExpertShare.sliced, **work)
    assert plan_of_text(plan_text(plan)) == plan and "share: sliced" in plan_text(plan)
    with opened(plan, checkpoint, company) as session:
        got = logits(session)
        reports = session.rank.reports()
    assert (got[0] - want[0]).abs().max() < 0.02 * want[0].abs().max(), "of prompts: rounded otherwise"
    assert all(report["hops"]["received"] > 3 * 4 for report in reports)


def test_a_batch_that_is_left_between_two_passes_leaves_the_next_one_right(company: Company, tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path / "model", "mixtral", layers=4)
    made = decisions(batch=3, pages=32, experts=ExpertSlots(0, 16))
    with opened(dealt_plan(checkpoint, made, 2, share=ExpertShare.sliced, batch=3, requests=3), checkpoint, company) as session:
        want = logits(session)
        batch, sampler = Batch(PROMPTS, 4, 1 << 20, frozenset()), Sampler(Sampling(), session.device)
        left = session.generating(batch, sampler)
        next(left)
        left.close()
        again = session.generate(batch, sampler, keep_logits=True)
    assert torch.equal(torch.stack([step.float() for step in again.logits]), want)


def test_experts_that_cannot_be_cut_are_refused_by_every_rank(tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path / "model", "mixtral", layers=2, intermediate_size=161)
    model = build_skeleton(checkpoint, [ExpertsInTurn()])
    with pytest.raises(UserError, match="has experts that are not cut into 2 slices; solve again with moe.share=whole"):
        DealtModel(Dealing.even(2, 2, ExpertShare.sliced), 0, 300, 2).convert(model)
