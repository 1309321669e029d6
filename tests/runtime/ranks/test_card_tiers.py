"""Tiers of experts in VRAM, of several ranks: host memory stands for their cards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.company import starting
from penstock.runtime.company.company import Company
from penstock.runtime.engine.generate import Batch, Generation
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.sampling import Sampler, Sampling
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.memory.ground import OpenCard
from tests.runtime.ranks.company import dealt_plan
from tests.support import HostCopier, decisions, machine, plan_for, save_tiny

CPU = torch.device("cpu")
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=12, chunk_tokens=1 << 20, limits=[12, 5, 9])


@pytest.fixture(scope="module")
def company() -> Iterator[Company]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(starting, "LED", "tests.runtime.ranks.led_without_card")
        made = starting.start(2)
    try:
        yield made
    finally:
        made.leave()


def generated(plan: Plan, checkpoint: Path, company: Company | None) -> tuple[Generation, dict[str, Any]]:
    ground = OpenCard(HostCopier(), CPU, company)
    with open_session(plan, checkpoint, ground, EngineOptions(one_card=company is not None)) as session:
        session.load(BATCH)
        made = session.generate(BATCH, Sampler(Sampling(), CPU), keep_logits=True)
        return made, session.engine.facts()


@pytest.mark.parametrize("share", ExpertShare)
def test_two_ranks_stream_experts_as_one_does(tmp_path: Path, company: Company, share: ExpertShare) -> None:
    """Sliced ones are waited for between two units of the rank that serves them."""
    checkpoint = save_tiny(tmp_path, model_type="mixtral")
    made = decisions(gpu=True, resident=(3, 3, 1), cap=0, hwm=3, distance=0, experts=ExpertSlots(8, 24))
    wanted, _ = generated(plan_for(checkpoint, made, gpu=True), checkpoint, None)
    found, facts = generated(dealt_plan(checkpoint, made, 2, machine(True, devices=(0, 1)), share), checkpoint, company)
    assert facts["experts"]["vram"]["misses"] > 5
    assert (found.logits[0].float() - wanted.logits[0].float()).abs().max() < 0.03 * wanted.logits[0].abs().max()
