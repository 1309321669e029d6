"""Tiers of experts in VRAM, of several ranks: host memory stands for their cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.contract.decided.decisions import Decisions, ExpertSlots, MissedExperts
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.company.company import Company
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.memory.ground import OpenCard
from tests.runtime.ranks.company import dealt_plan
from tests.support import HostCopier, decisions, machine, plan_for, save_tiny

CPU = torch.device("cpu")
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=12, chunk_tokens=1 << 20, limits=[12, 5, 9])


def generated(plan: Plan, checkpoint: Path, company: Company | None) -> tuple[Generation, dict[str, Any]]:
    ground = OpenCard(HostCopier(), CPU, company)
    with open_session(plan, checkpoint, ground, EngineOptions(one_card=company is not None)) as session:
        session.load(BATCH)
        made = session.generate(BATCH, Sampler(Sampling(), CPU), keep_logits=True)
        return made, session.engine.facts()


STREAMED = decisions(gpu=True, resident=(1, 0, 1), cap=3, hwm=6, distance=3)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(replace(STREAMED, prefill_part_tokens=7), id="prompts in parts"),
        pytest.param(
            replace(STREAMED, weights=replace(STREAMED.weights, host=HostUnits(2, 2))),
            id="the CPU beside the cards",
            marks=pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler made the CPU's products"),
        ),
    ],
)
def test_two_ranks_stream_layers_as_one_does(tmp_path: Path, company: Company, made: Decisions) -> None:
    checkpoint, rates = save_tiny(tmp_path), HostRates(2, {"BF16": Curve(((1, 20.0), (4, 20.0)))}, 1e-5, 0.75, 0.84, attention_hop_s=1e-4)
    wanted, _ = generated(plan_for(checkpoint, STREAMED, gpu=True), checkpoint, None)
    card = machine(True, cpu_cores=2, cpu_threads=2, devices=(0, 1), host=rates)
    found, facts = generated(dealt_plan(checkpoint, made, 2, card), checkpoint, company)
    assert found.tokens == wanted.tokens
    assert (found.logits[0].float() - wanted.logits[0].float()).abs().max() < 0.02 * wanted.logits[0].abs().max()
    assert (facts["handed"] or {"steps": 0})["steps"] == (7 if made.weights.host.ffn else 0), "those of one and of two rows"


@pytest.mark.parametrize("share", ExpertShare)
def test_two_ranks_stream_experts_as_one_does(tmp_path: Path, company: Company, share: ExpertShare) -> None:
    """Sliced ones are waited for between two units of the rank that serves them."""
    checkpoint = save_tiny(tmp_path, model_type="mixtral")
    made = decisions(gpu=True, resident=(3, 3, 1), cap=0, hwm=3, distance=0, experts=ExpertSlots(8, 24))
    wanted, _ = generated(plan_for(checkpoint, made, gpu=True), checkpoint, None)
    found, facts = generated(dealt_plan(checkpoint, made, 2, machine(True, devices=(0, 1)), share), checkpoint, company)
    assert facts["experts"]["vram"]["misses"] > 5
    assert (found.logits[0].float() - wanted.logits[0].float()).abs().max() < 0.03 * wanted.logits[0].abs().max()


@pytest.mark.skipif(products_unbuilt() is not None, reason="no compiler made the CPU's products")
def test_two_ranks_have_the_cpu_compute_missed_experts_in_turn(tmp_path: Path, company: Company) -> None:
    """Texts part where rounding decides, so logits are compared up to there. Threads sleep until the visit's router has chosen."""
    checkpoint = save_tiny(tmp_path, model_type="mixtral")
    made = decisions(gpu=True, resident=(3, 3, 1), cap=0, hwm=3, distance=0, batch=3, experts=ExpertSlots(8, 24))
    split = replace(made, experts=ExpertSlots(8, 24, host=MissedExperts.split))
    rates = HostRates(2, {"BF16": Curve(((1, 200.0), (4, 200.0)))}, 0.0, 1.0, 1.0)  # to ask the CPU takes longer than such small ones
    card = machine(True, cpu_cores=2, cpu_threads=2, devices=(0, 1), host=rates, layer_launch_s=1e-9)
    wanted, _ = generated(dealt_plan(checkpoint, made, 2, card, batch=3), checkpoint, company)
    found, facts = generated(dealt_plan(checkpoint, split, 2, card, batch=3), checkpoint, company)
    assert facts["experts"]["computed_on_cpu"] > 5
    compared = 0
    for passed, (a, b) in enumerate(zip(found.logits, wanted.logits, strict=True)):
        if any(own[:passed] != other[:passed] for own, other in zip(found.tokens, wanted.tokens, strict=True)):
            break
        assert (a.float() - b.float()).abs().max() < 0.03 * b.abs().max()
        compared += 1
    assert compared > 2
