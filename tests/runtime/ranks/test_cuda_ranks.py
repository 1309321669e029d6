"""On a real card, which all ranks share: a dealt model says what it says on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.contract.decided.decisions import Decisions, ExpertSlots, KvPages, MissedExperts
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.host_rates import HostRates
from penstock.planner.contract.given.links import Links
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.company.company import Company
from penstock.runtime.company.starting import start
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.memory.device import CudaDevice
from penstock.runtime.memory.ground import OpenCard
from tests.runtime.ranks.company import dealt_plan
from tests.support import decisions, machine, plan_for, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

CARD = torch.device("cuda", 0)
BATCH = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 20], max_new_tokens=24, chunk_tokens=1 << 20, limits=[24, 9, 17])
PLACES: dict[str, dict[str, Any]] = {
    "resident": {"resident": (3, 3, 1), "cap": 0, "hwm": 3, "distance": 0},
    "streamed": {"resident": (1, 0, 1), "cap": 3, "hwm": 6, "distance": 3},
}


@pytest.fixture(scope="module")
def company() -> Iterator[Company]:
    """Two ranks on the first card."""
    made = start(2, (0, 0))
    try:
        yield made
    finally:
        made.leave()


def generated(plan: Plan, checkpoint: Path, company: Company | None, batch: Batch = BATCH) -> tuple[Generation, dict[str, Any]]:
    ground = OpenCard(CudaDevice(0), CARD, company)
    with open_session(plan, checkpoint, ground, EngineOptions(one_card=company is not None)) as session:
        session.load(batch)
        made = session.generate(batch, Sampler(Sampling(), CARD), keep_logits=True)
        return made, session.engine.facts()


def of_ranks(made: Decisions, checkpoint: Path, recorded: bool, share: ExpertShare = ExpertShare.whole, **work: Any) -> Plan:
    """A plan of two ranks, whose steps are recorded with their hops, or launched."""
    rates = HostRates(2, {"BF16": Curve(((1, 20.0), (4, 20.0)))}, 1e-5, 0.75, 0.84, attention_hop_s=1e-4)
    links = Links(word_hop_s=2e-5 if recorded else 0.0)
    found = machine(True, cpu_cores=2, cpu_threads=2, devices=(0, 1), links=links, host=rates)
    assert found.gpu is not None
    return dealt_plan(checkpoint, made, 2, replace(found, gpu=replace(found.gpu, layer_kernels_s=1e-5)), share, **work)


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("where", PLACES)
def test_two_ranks_on_a_card_say_what_one_says(tmp_path: Path, company: Company, where: str, recorded: bool) -> None:
    checkpoint = save_tiny(tmp_path)
    made = decisions(gpu=True, **PLACES[where])
    wanted, _ = generated(plan_for(checkpoint, made, gpu=True), checkpoint, None)
    found, facts = generated(of_ranks(made, checkpoint, recorded), checkpoint, company)
    if recorded:
        assert {"rows": 3, "refused": None}.items() <= facts["graphs"].items() and facts["graphs"]["steps"] > 20
    else:
        assert facts["graphs"] is None
    assert found.tokens == wanted.tokens
    for a, b in zip(found.logits, wanted.logits, strict=True):
        assert torch.allclose(a.float(), b.float(), atol=0.02 * b.abs().max().item(), rtol=0)


@pytest.mark.parametrize("parts", [0, 7], ids=["whole", "in parts"])
def test_two_ranks_on_a_card_bring_the_kv_of_their_layers(tmp_path: Path, company: Company, parts: int) -> None:
    """Of each rank's three layers one lies in VRAM, one in DRAM, one on the SSD."""
    checkpoint = save_tiny(tmp_path)
    made = replace(decisions(gpu=True, **PLACES["streamed"]), prefill_part_tokens=parts)
    home, outside = (replace(made, kv=KvPages(64, *(count * 4 for count in places))) for places in ((3, 0, 0), (1, 1, 1)))
    wanted, _ = generated(of_ranks(home, checkpoint, False), checkpoint, company)
    found, _ = generated(of_ranks(outside, checkpoint, False, kv_spill=True), checkpoint, company)
    assert found.tokens == wanted.tokens and all(map(torch.equal, found.logits, wanted.logits))


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
def test_two_ranks_on_a_card_hand_units_over_to_the_cpu(tmp_path: Path, company: Company, recorded: bool) -> None:
    """Of prompts and of the steps behind them; a row of three sequences decodes, then two, then one."""
    checkpoint = save_tiny(tmp_path)
    made = decisions(gpu=True, **PLACES["streamed"])
    wanted, _ = generated(plan_for(checkpoint, made, gpu=True), checkpoint, None)
    handed = replace(made, weights=replace(made.weights, host=HostUnits(2, 3 if recorded else 2)))
    found, facts = generated(of_ranks(handed, checkpoint, recorded), checkpoint, company)
    if recorded:
        graphs = facts["graphs"]
        assert facts["handed"] is None and {"rows": 3, "refused": None}.items() <= graphs.items() and graphs["steps"] > 20
        assert graphs["schedules"]["steps"]["the plan's"] > 3, "what the CPU computed was held to the card"
    else:
        assert facts["handed"]["steps"] == 15, "those of one and of two rows, of 24 tokens of the longest sequence"
    compared = 0
    for passed, (a, b) in enumerate(zip(found.logits, wanted.logits, strict=True)):
        if any(made[:passed] != own[:passed] for made, own in zip(found.tokens, wanted.tokens, strict=True)):
            break  # the CPU adds up in another order: a tie may fall the other way
        assert torch.allclose(a.float(), b.float(), atol=0.02 * b.abs().max().item(), rtol=0)
        compared += 1
    assert compared > 9, "steps that handed units over"


@pytest.mark.parametrize("rows", [1, 3])
def test_two_ranks_on_a_card_record_what_lies_between_their_experts(tmp_path: Path, company: Company, rows: int) -> None:
    checkpoint = save_tiny(tmp_path, model_type="mixtral")
    batch = replace(BATCH, prompts=BATCH.prompts[:rows], limits=[24] * rows)
    made = decisions(gpu=True, resident=(3, 3, 1), cap=0, hwm=3, distance=0, experts=ExpertSlots(8, 24))
    wanted, _ = generated(of_ranks(made, checkpoint, False), checkpoint, company, batch)
    found, facts = generated(of_ranks(made, checkpoint, True), checkpoint, company, batch)
    assert {"rows": rows, "refused": None, "steps": 23}.items() <= facts["graphs"].items()
    assert facts["graphs"]["pieces"] == (7 if rows == 1 else 4) and facts["graphs"]["visits"] == (3 * 23 if rows == 1 else 0)
    alike = next((k for k, (a, b) in enumerate(zip(found.tokens[0], wanted.tokens[0], strict=True)) if a != b), 23)
    assert alike > 0, "the prompts' own tokens"
    for a, b in zip(found.logits[: alike + 1], wanted.logits[: alike + 1], strict=True):
        assert torch.allclose(a.float(), b.float(), atol=0.03 * b.abs().max().item(), rtol=0)


@pytest.mark.parametrize("share", ExpertShare)
def test_two_ranks_on_a_card_share_experts(tmp_path: Path, company: Company, share: ExpertShare) -> None:
    """Of prompts: what follows a token that was drawn may be another one, since sums are rounded in another order."""
    checkpoint = save_tiny(tmp_path, model_type="mixtral")
    made = decisions(gpu=True, resident=(3, 3, 1), cap=0, hwm=3, distance=0, experts=ExpertSlots(8, 24))
    wanted, _ = generated(plan_for(checkpoint, made, gpu=True), checkpoint, None)
    found, _ = generated(of_ranks(made, checkpoint, False, share), checkpoint, company)
    assert torch.allclose(found.logits[0].float(), wanted.logits[0].float(), atol=0.03 * wanted.logits[0].abs().max().item(), rtol=0)


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
def test_two_ranks_on_a_card_have_the_cpu_compute_missed_experts(tmp_path: Path, company: Company, recorded: bool) -> None:
    """Behind a token that rounding decided texts may part: logits are compared up to there."""
    checkpoint = save_tiny(tmp_path, model_type="mixtral")
    made = decisions(gpu=True, resident=(3, 3, 1), cap=0, hwm=3, distance=0, batch=3, experts=ExpertSlots(8, 24))
    split = replace(made, experts=ExpertSlots(8, 24, host=MissedExperts.split))
    plans = (of_ranks(made, checkpoint, recorded, batch=3), of_ranks(split, checkpoint, recorded, batch=3))
    fast = HostRates(2, {"BF16": Curve(((1, 200.0), (4, 200.0)))}, 0.0, 1.0, 1.0)  # to ask the CPU takes longer than such small ones
    plans = tuple(replace(plan, hardware=replace(plan.hardware, host=fast, layer_launch_s=1e-9)) for plan in plans)
    (wanted, _), (found, facts) = (generated(plan, checkpoint, company) for plan in plans)
    assert facts["experts"]["computed_on_cpu"] > 5
    compared = 0
    for passed, (a, b) in enumerate(zip(found.logits, wanted.logits, strict=True)):
        if any(own[:passed] != other[:passed] for own, other in zip(found.tokens, wanted.tokens, strict=True)):
            break
        assert torch.allclose(a.float(), b.float(), atol=0.03 * b.abs().max().item(), rtol=0)
        compared += 1
    assert compared > 1, "a step at least"
