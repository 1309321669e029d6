"""Texts and logits of a model that is dealt over ranks are those of one process, bit for bit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import Card
from penstock.planner.contract.given.links import Links
from penstock.planner.contract.plan.planfile import plan_of_text, plan_text
from penstock.planner.solver.drafts.draft_choice import drafted
from penstock.planner.solver.layer_counts import with_counts
from penstock.planner.solver.terms.problem import Question
from penstock.runtime.asked.foreseen import for_requests
from penstock.runtime.asked.sampling_keys import Sampling
from penstock.runtime.company.company import Company
from penstock.runtime.engine.passes.generate import Batch, Generation
from penstock.runtime.engine.passes.sampling import Sampler
from penstock.runtime.engine.session import Session
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.ranks.company import EVERY, alike, dealt_plan, opened
from tests.support import GPU, decisions, machine, save_tiny, workload


@dataclass(frozen=True)
class Case:
    """A checkpoint, how it is dealt, and what it is asked."""

    dealt: int | tuple[int, ...]
    """Ranks with as many layers, or so many of each."""
    model: dict[str, Any] = field(default_factory=dict)
    decided: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[tuple[int, ...], ...] = (tuple(range(5, 25)),)
    chunk: int = 1 << 20
    """Tokens of a pass where one process computes, and of a pass or of its parts where several do."""
    parts: bool = False
    sampling: Sampling = Sampling()
    stop: frozenset[int] = frozenset()


SOME = (tuple(range(7, 47)), (9, 8, 7), tuple(range(100, 111)))
CASES = {
    "one after the other": Case(2),
    "layers that do not divide": Case(3, {"layers": 7}),
    "a tied head, layers from the drive": Case(2, {"tied": True}, {"cap": 1, "hwm": 2, "distance": 1}),
    "unequal prompts in chunks": Case(3, {}, {"batch": 3, "pages": 32}, SOME, chunk=4),
    "windows on some layers": Case(2, {"model_type": "gemma2", "layers": 5, "sliding_window": 8}, prompts=(tuple(range(3, 33)),)),
    "experts that each rank reads for its own layers": Case(
        2, {"model_type": "mixtral", "layers": 5}, {"batch": 3, "pages": 32, "experts": ExpertSlots(0, 5)}, SOME
    ),
    "experts on some ranks alone": Case(
        3, {"model_type": "qwen3_moe", "layers": 5, "mlp_only_layers": [1, 4]}, {"experts": ExpertSlots(0, 3)}
    ),
    "a pass in parts": Case(3, {"layers": 7}, {"cap": 1, "hwm": 4, "distance": 4}, SOME[:1], chunk=7, parts=True),
    "windows, in parts": Case(2, {"model_type": "gemma2", "sliding_window": 8}, prompts=(tuple(range(3, 33)),), chunk=8, parts=True),
    "more layers of one rank": Case((4, 2)),
    "fewer layers of the first rank, in parts": Case(
        (1, 4, 2), {"layers": 7}, {"cap": 1, "hwm": 4, "distance": 4}, SOME[:1], chunk=7, parts=True
    ),
    "windows, more layers of one rank": Case(
        (2, 5), {"model_type": "gemma2", "layers": 7, "sliding_window": 8}, {"batch": 3, "pages": 32}, SOME
    ),
    "drawn, with a stop token": Case(
        2, {"model_type": "qwen2"}, {"batch": 3, "pages": 32}, SOME, 1 << 20, Sampling(temperature=1.5, seed=3)
    ),
}
TYPES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "phi3",
    "granite",
    "cohere",
    "starcoder2",
    "stablelm",
]
if EVERY:
    CASES |= {f"{name} on {count}": Case(count, {"model_type": name}) for name in TYPES for count in (2, 3)}


def generated(session: Session, case: Case) -> Generation:
    batch = Batch(case.prompts, 6, case.chunk, case.stop)
    sampler = Sampler(case.sampling, session.device)
    session.load(batch, samplers=[sampler])
    return session.generate(batch, sampler, keep_logits=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_dealt_over_ranks_a_model_says_the_same_bit_for_bit(case: Case, company: Company, tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path / "model", **case.model)
    made = decisions(prefill_chunk_tokens=case.chunk, **case.decided)
    dealt = replace(made, prefill_chunk_tokens=1 << 20, prefill_part_tokens=case.chunk) if case.parts else made
    work = {"batch": len(case.prompts), "requests": len(case.prompts)}
    with opened(dealt_plan(checkpoint, made, 1, **work), checkpoint, None) as alone:
        want = generated(alone, case)
    with opened(dealt_plan(checkpoint, dealt, case.dealt, **work), checkpoint, company) as session:
        got = generated(session, replace(case, chunk=1 << 20) if case.parts else case)
        session.book("decode")
        reports = session.rank.reports()
    assert got.tokens == want.tokens
    assert all(map(alike, got.logits[::-1], want.logits[::-1])), "the last ones: passes may be fewer"
    assert all(report["part_tokens"] == dealt.prefill_part_tokens for report in reports)
    layers = [report["layers"] for report in reports]
    assert sum(layers) < case.model.get("layers", 6) and len(layers) == (case.dealt if isinstance(case.dealt, int) else len(case.dealt)) - 1
    assert all(report["hops"]["received_bytes"] and "decode" in report["stages"] for report in reports)
    assert all((report["hops"]["by"], report["hops"]["refused"]) == ("gloo", None) for report in reports)


def test_layers_chosen_for_unlike_cards_are_run_bit_for_bit_and_promised_as_they_are_dealt(company: Company, checkpoint: Path) -> None:
    """The numbers come from the program; the ranks that run them have no cards."""
    slow = replace(GPU, h2d=Curve(tuple((size, rate / 3) for size, rate in GPU.h2d.points)), memory_gbps=GPU.memory_gbps / 3)
    cards = machine(gpu=True, devices=(0, 1), others=(Card(1, 8 << 30, slow),), layer_launch_s=1e-9, links=Links(hop_s=1e-12))
    chosen = with_counts(Question(cards, spec_from_checkpoint(checkpoint), workload(), ranks=2))
    assert chosen.dealing.counts[0] > chosen.dealing.counts[1]
    case = Case(chosen.dealing.counts)
    plan = plan_of_text(plan_text(dealt_plan(checkpoint, decisions(), case.dealt)))
    again = for_requests(plan, 1, plan.workload.prompt_tokens, plan.workload.new_tokens, 1)
    assert again.prediction == plan.prediction and again.dealing == chosen.dealing
    with opened(dealt_plan(checkpoint, decisions(), 1), checkpoint, None) as alone:
        want = generated(alone, case)
    with opened(again, checkpoint, company) as session:
        got = generated(session, case)
    assert got.tokens == want.tokens and all(map(torch.equal, got.logits, want.logits))


def test_a_packed_store_gives_each_rank_its_own_layers(company: Company, tmp_path: Path) -> None:
    case, made = Case((1, 3), {"model_type": "mixtral", "layers": 4}), decisions(experts=ExpertSlots(0, 5))
    checkpoint, packed = save_tiny(tmp_path / "model", **case.model), tmp_path / "packed"
    pack_checkpoint(checkpoint, packed, None, False, lambda *_: None)
    with opened(dealt_plan(checkpoint, made, 1), checkpoint, None) as alone:
        want = generated(alone, case)
    with opened(dealt_plan(packed, made, case.dealt), packed, company) as session:
        got = generated(session, case)
    assert got.tokens == want.tokens and all(map(torch.equal, got.logits, want.logits))


def test_a_batch_that_is_left_between_two_passes_leaves_the_next_one_right(company: Company, checkpoint: Path) -> None:
    plan = dealt_plan(checkpoint, decisions(), 2)
    case = Case(2)
    with opened(plan, checkpoint, company) as session:
        want = generated(session, case)
        sampler = Sampler(case.sampling, session.device)
        left = session.generating(Batch(case.prompts, 6, case.chunk), sampler)
        next(left)
        left.close()
        again = session.generate(Batch(case.prompts, 6, case.chunk), sampler, keep_logits=True)
    assert again.tokens == want.tokens and all(map(torch.equal, again.logits, want.logits))


def test_a_rank_with_other_weights_refuses_before_anything_is_loaded(company: Company, checkpoint: Path, tmp_path: Path) -> None:
    mine = save_tiny(tmp_path / "model")
    plan = dealt_plan(mine, decisions(), 2)
    words: list[dict[str, Any]] = []
    tell, company.tell = company.tell, lambda said, count=None: words.append(said)  # type: ignore[method-assign]
    hear, company.hear = company.hear, lambda rank=0: {"refused": "no"}  # type: ignore[method-assign]
    try:
        with pytest.raises(UserError, match="rank 1: no"), opened(plan, mine, company):
            pass
    finally:
        company.tell, company.hear = tell, hear  # type: ignore[method-assign]
    other = save_tiny(tmp_path / "other", seed=1, layers=5)
    company.tell(json.loads(json.dumps(words[0] | {"checkpoint": str(other)})), 2)
    assert "holds other weights than rank 0's checkpoint" in company.hear(1)["refused"]
    company.tell(words[0] | {"version": "0"}, 2)
    assert "rank 0 has 0; install the same" in company.hear(1)["refused"]


def test_a_plan_of_ranks_goes_into_words_and_comes_back(checkpoint: Path) -> None:
    plan = dealt_plan(checkpoint, decisions(), (3, 2, 1))
    assert "layers: [3, 2, 1]" in plan_text(plan)
    again = plan_of_text(plan_text(plan))
    assert again == plan and [again.of_rank(rank).model.layers for rank in range(3)] == [3, 2, 1]


@pytest.mark.parametrize("dealt", [2, 3] if EVERY else [2])
def test_ranks_verify_what_was_looked_up(dealt: int, company: Company, tmp_path: Path) -> None:
    """Every rank computes the drafts' rows, and what was not kept is nobody's."""
    checkpoint = save_tiny(tmp_path / "model", layers=4)
    made = decisions(pages=32)
    drafting = replace(made, speculation=Speculation(Drafter.lookup, 4, 0.3))
    case = Case(dealt, prompts=((5, 6, 7, 8, 9) * 6,))
    with opened(dealt_plan(checkpoint, made, 1), checkpoint, None) as alone:
        want = said(alone, case, 24)
    with opened(dealt_plan(checkpoint, drafting, dealt), checkpoint, company) as session:
        got, chains = said(session, case, 24), session.chains
    assert got == want and chains is not None and chains.facts()["drafted"] > 3


@pytest.mark.parametrize("dealt", [2, (1, 3), (1, 2, 1)] if EVERY else [2, (1, 3)])
def test_a_model_beside_rank_0_drafts_for_all(dealt: int | tuple[int, ...], company: Company, tmp_path: Path) -> None:
    """Its own copy, which is right but for ties. Rank 0 may have fewer layers than others, down to one."""
    checkpoint = save_tiny(tmp_path / "model", layers=4)
    made, case = decisions(pages=32), Case(dealt)
    with opened(dealt_plan(checkpoint, made, 1), checkpoint, None) as alone:
        want = said(alone, case, 24)
    plan = drafted(dealt_plan(checkpoint, made, dealt), Speculation(Drafter.self, 4, 0.8, spec_from_checkpoint(checkpoint)))
    with opened(plan_of_text(plan_text(plan)), checkpoint, company) as session:
        got, chains = said(session, case, 24), session.chains
        layers = [report["layers"] for report in session.rank.reports()]
    assert got == want and chains is not None and layers == list(plan.dealing.counts[1:])
    facts = chains.facts()
    assert facts["drafter"] == Drafter.self and int(str(facts["kept"])) > 0, "chains are as long as pays on this machine"


def said(session: Session, case: Case, tokens: int) -> list[list[int]]:
    batch, sampler = Batch(case.prompts, tokens, case.chunk), Sampler(case.sampling, session.device)
    session.load(batch, samplers=[sampler])
    return session.generate(batch, sampler).tokens
