"""Rings in which FFN units have one slot: what link and card wait for each other, and when the program takes one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.render.decided import decided
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.ranks.ranks_act import RanksSimulation
from penstock.planner.solver.program import solve
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, MB, gpu, machine, model, work
from tests.planner.test_simulate_ranks import BESIDE, with_cpu

LINK = Curve(((MB, 25.0), (256 * MB, 25.0)))
CARD = gpu(layer_kernels_s=8e-5, h2d=LINK)
HERE = machine(vram=2 * GB, dram=64 * GB, gpu=CARD)
M = model(24)
ONE, HALVES = Force(vram_slots=4, vram_ffn_slots=1), Force(vram_slots=4, vram_ffn_slots=0)


def slots(made: Decisions) -> dict[str, int]:
    return {kind: count for kind, (count, _) in place(M, made.weights, True).ring_classes.items()}


def test_of_a_ring_with_one_slot_for_ffn_attention_has_the_others() -> None:
    assert slots(solve(HERE, M, work(), ONE)) == {"attn": 3, "ffn": 1}
    assert slots(solve(HERE, M, work(), HALVES)) == {"attn": 2, "ffn": 2}


@pytest.mark.parametrize("prompt", [64, 512, 2048, 4096])
@pytest.mark.parametrize("resident", [{}, {"resident_attn": 24}, {"resident_ffn": 5}, {"resident_head": 0}])
@pytest.mark.parametrize("form", [ONE, Force(vram_slots=3)], ids=["3 + 1", "2 + 1"])
def test_what_waits_for_the_one_slot_is_predicted_as_it_is_simulated(prompt: int, resident: dict[str, int], form: Force) -> None:
    """Of the longest prompts compute takes twice as long as copies, of the shortest hardly any time."""
    w = work(prompt_tokens=prompt, new_tokens=8)
    made = solve(HERE, M, w, form.but(prefill_chunk_tokens=prompt, **resident))
    said = predict(HERE, M, w, made)
    assert slots(made)["ffn"] == 1 or not slots(made).get("attn")
    acted = Simulation(Plan(HERE, M, w, made, said)).run().record
    assert said.ttft_s == pytest.approx(acted.prefill_ns[-1] / 1e9, rel=0.06)
    assert said.decode_s_per_token == pytest.approx(acted.step_ns[-1] / 1e9, rel=0.03)


def test_the_program_takes_it_where_the_slot_is_worth_more_as_a_resident() -> None:
    own = solve(HERE, M, work())
    assert (own.weights.vram.slots, own.weights.vram.ffn_slots) == (4, 1)
    halves = solve(HERE, M, work(), HALVES)
    assert place(M, own.weights, True).h2d_bytes_per_pass < place(M, halves.weights, True).h2d_bytes_per_pass - 60 * MB
    seconds = [Simulation(Plan(HERE, M, work(), made, predict(HERE, M, work(), made))).run().record.step_ns[-1] for made in (own, halves)]
    assert seconds[0] < 0.97 * seconds[1]


def test_it_does_not_where_the_first_token_counts_and_the_card_computes_as_long_as_copies_take() -> None:
    w = work(prompt_tokens=2048, objective=Objective.ttft)
    own, one = solve(HERE, M, w), solve(HERE, M, w, ONE)
    assert own.weights.vram.ffn_slots == 0
    assert predict(HERE, M, w, own).prefill_s < 0.95 * predict(HERE, M, w, one).prefill_s


def test_where_copies_of_others_come_between_kinds_share_the_ring_evenly() -> None:
    assert solve(HERE, M, work(kv_spill=True)).weights.vram.ffn_slots == 0
    experts = model(16, experts=8)
    assert solve(HERE, experts, work()).weights.vram.ffn_slots == 0


def test_several_ranks_take_it_too_and_not_where_the_cpu_computes_for_them_in_turn() -> None:
    question = Question(with_cpu(None), BESIDE, work(new_tokens=24), ranks=2)
    alone = answer_dealt(question)
    assert [one.placement.ring_classes["ffn"][0] for one in alone.each_rank] == [1, 1]
    halves = answer_dealt(replace(question, force=HALVES))
    acted = [RanksSimulation(plan, Options()).run()[0].record for plan in (alone, halves)]
    seconds = [record.step_ns[-1] / 1e9 for record in acted]
    assert seconds[0] < 0.97 * seconds[1]
    assert alone.prediction.decode_s_per_token == pytest.approx(seconds[0], rel=0.05)
    beside = answer_dealt(replace(question, hardware=with_cpu()))
    assert any(one.placement.host_units for one in beside.each_rank)
    assert not any(one.placement.ring_classes["ffn"][0] == 1 for one in beside.each_rank)


def test_a_plan_says_how_many_slots_each_kind_has() -> None:
    for force, words in ((ONE, "3 for attention, 1 for FFN"), (HALVES, "2 for attention, 2 for FFN"), (Force(resident_attn=24), "")):
        made = solve(HERE, M, work(), force)
        rows = {subject: aside for subject, _, aside in decided(Plan(HERE, M, work(), made, predict(HERE, M, work(), made)))}
        assert ("for FFN" in rows["VRAM ring"]) == bool(words) and words in rows["VRAM ring"]


def test_who_forces_the_ring_divides_it() -> None:
    own = solve(HERE, M, work())
    assert solve(HERE, M, work(), Force(vram_slots=6)).weights.vram.ffn_slots == 0
    wider = solve(HERE, M, work(), Force(vram_ffn_slots=9)).weights.vram
    assert (wider.slots, wider.ffn_slots) == (10, 9)
    assert Force(vram_slots=6).apply(own, M.layers).weights.vram.ffn_slots == 0, "a plan that is run with other slots, too"
    assert Force(vram_prefetch_distance=1).apply(own, M.layers).weights.vram.ffn_slots == 1
    with pytest.raises(UserError, match=r"force.vram_ffn_slots=4 breaks .*allowed: 0 to 3 with slots=4"):
        solve(HERE, M, work(), Force(vram_slots=4, vram_ffn_slots=4))
    none = replace(own, weights=replace(own.weights, vram=replace(own.weights.vram, ffn_slots=4)))
    assert [rule.name for rule in broken_rules(HERE, M, work(), none)] == ["weights.vram.ffn_slots range"]
