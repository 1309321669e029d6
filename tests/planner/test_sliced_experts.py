"""Routed experts of which every rank has a slice: what a plan of them promises, and who chooses it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.given.formats import QUANTISED
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.planfile import check_plan
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.ranks.rank_model import model_of_rank
from penstock.planner.explain.purchases import offers
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.ranks.ranks_act import RanksSimulation
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.solver.share_choice import share_of
from penstock.planner.solver.terms.problem import Question
from tests.cli import refusal
from tests.planner.small import GB, MB, model, work
from tests.planner.test_ranks import host
from tests.planner.test_simulate_ranks import CARDS

EXPERT = 3 * 4096 * 14336 * 2
LARGE = {"layers": 16, "attn": 84 * MB, "ffn": 8 * EXPERT, "experts": 8}
SMALL = {"layers": 16, "attn": 84 * MB, "ffn": 64 * EXPERT // 168, "experts": 64}


def question(
    count: int, share: ExpertShare = ExpertShare.sliced, dram: int = 256 * GB, vram: int = 8 * GB, launch_s: float = 5e-4, **of: object
) -> Question:
    whole, machine = model(**(LARGE | of)), host(vram=vram, dram=dram, **CARDS, layer_launch_s=launch_s)
    return Question(machine, whole, work(requests=2, new_tokens=64), ranks=count, share=share)


@pytest.mark.parametrize("counts", [(4, 4, 4, 4), (3, 13)])
def test_all_ranks_together_have_every_expert_once(counts: tuple[int, ...]) -> None:
    whole, dealing = model(**LARGE), Dealing(counts, ExpertShare.sliced)
    parts = [model_of_rank(whole, dealing, rank) for rank in range(len(counts))]
    assert sum(part.weight_bytes for part in parts) == pytest.approx(whole.weight_bytes, rel=1e-6)
    for part in parts:
        assert part.experts is not None and part.experts.layers == tuple(range(16)), "of all layers"
        assert part.experts.nbytes == pytest.approx(whole.experts.nbytes / len(counts), rel=1e-6)
        assert part.moe == tuple(range(part.layers)) and not part.has_dense
        assert part.in_turn.experts.layers == dealing.of(part.dealt.rank), "those that compute in their turn"


def test_slices_take_as_long_as_they_are_simulated() -> None:
    count = 4
    plan = answer_dealt(question(count))
    check_plan(plan)
    slots = {plan.of_rank(rank).decisions.experts.vram_slots for rank in range(count)}
    assert len(slots) == 1, "all ranks miss the same ones"
    acted = RanksSimulation(plan, Options()).run()
    assert len({one.experts["vram"].misses for one in acted}) == 1
    assert fmean(acted[0].record.step_ns) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=0.03)
    assert fmean(acted[0].record.prefill_ns) / 1e9 == pytest.approx(plan.prediction.prefill_s, rel=0.03)
    whole = answer_dealt(replace(question(count), share=ExpertShare.whole)).prediction
    assert plan.prediction.decode_s_per_token < 0.7 * whole.decode_s_per_token


def test_a_layer_waits_for_what_others_launch_once_they_are_told() -> None:
    """Launching takes a rank's own layers longer than reading, and reading its slices of the others' longer than launching."""
    plan = answer_dealt(question(2, vram=24 * GB))
    assert plan.decisions.experts.vram_slots == plan.model.experts.units, "nothing is missed"
    record = RanksSimulation(plan, Options()).run()[0].record
    assert fmean(record.step_ns) / 1e9 == pytest.approx(plan.prediction.decode_s_per_token, rel=5e-3)
    assert fmean(record.prefill_ns) / 1e9 == pytest.approx(plan.prediction.prefill_s, rel=5e-3)


def test_slices_are_chosen_where_they_are_faster() -> None:
    share, notes = share_of(None, question(4, ExpertShare.whole))
    assert share is ExpertShare.sliced and "each rank has a slice of every expert: " in notes[0] and "moe.share=whole" in notes[0]
    assert share_of(ExpertShare.whole, question(4)) == (ExpertShare.whole, ())
    assert share_of(None, question(4, **SMALL, vram=40 * GB)) == (ExpertShare.whole, ()), "all stay: hops alone are more"
    assert share_of(None, question(4, dram=20 * GB)) == (ExpertShare.whole, ()), "the SSD has no slices in one piece"
    assert share_of(None, question(4, vram=0)) == (ExpertShare.whole, ())


def test_explain_says_what_slices_would_give() -> None:
    found = {offer.key: offer for offer in offers(question(4, ExpertShare.whole))}
    assert "moe.share=sliced" in found["share"].name and found["share"].question == question(4) and not found["share"].is_bought
    for without in (question(4), question(3, ExpertShare.whole), question(1, ExpertShare.whole)):
        assert "share" not in {offer.key for offer in offers(without)}


def coded(whole: ModelSpec) -> ModelSpec:
    form = QUANTISED["MXFP4"]
    return replace(whole, units=tuple(replace(u, format=form) if u.kind is UnitKind.expert else u for u in whole.units))


def test_what_cannot_be_cut_says_why() -> None:
    packed = replace(question(2), model=coded(model(**LARGE)))
    share, notes = share_of(None, packed)
    assert share is ExpertShare.whole and "stores its experts in MXFP4, whose groups are not cut" in notes[0]
    many = question(4, ExpertShare.whole, layers=48, experts=128, ffn=128 * EXPERT // 168, vram=4 * GB)
    assert share_of(None, many) == (
        ExpertShare.whole,
        ("each rank has whole experts, of its own layers: slices would be read in 6.29 million pieces",),
    )
    refused = {
        r"moe\.share=sliced: .* stores its experts in MXFP4, whose groups are not cut; set moe\.share=whole": packed,
        r"moe\.share=sliced: the width of .* is no multiple of 3; set moe\.share=whole": question(3),
        r"moe\.share=sliced: one rank has whole experts; set ranks=2 or more": question(1),
        r"moe\.share=sliced: .* has no routed experts; set moe\.share=whole": replace(question(2), model=model(layers=16)),
        r"moe\.share=sliced: moe\.policy=lookahead asks routers of layers that a rank has not": replace(
            question(2), force=Force(expert_policy=ExpertPolicyName.lookahead)
        ),
    }
    for said, asked in refused.items():
        with pytest.raises(UserError, match=said):
            share_of(ExpertShare.sliced, asked)


def test_the_command_line_refuses_in_one_line(tmp_path: Path) -> None:
    words = ("hardware=h100x4", "model=gpt-oss-120b", "ranks=2", "moe.share=sliced", "out=plan.yaml")
    assert "moe.share=sliced: " in refusal("planner", "solve", *words, cwd=tmp_path)
