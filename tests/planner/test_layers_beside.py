"""A model that drafts lies with the first of several ranks, which has fewer layers for it: as many as give the most tokens a second."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.contract.bills.cost import drafter_alone, predict
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.speculating import Drafter, Speculate, Speculation
from penstock.planner.contract.given.hardware import Card, HardwareProfile
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import plan_of_text, plan_text, read_plan, write_plan
from penstock.planner.contract.prices.memory_law import vram_use
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.ranks.host_shares import host_shares
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.explain.explanation import question_of
from penstock.planner.solver.drafts import speculation_choice
from penstock.planner.solver.layer_counts import with_counts
from penstock.planner.solver.planning import plan_dealt
from penstock.planner.solver.ranks_choice import may_spare
from penstock.planner.solver.terms.problem import Question
from tests.cli import command
from tests.planner.small import GB, MB, model, work
from tests.planner.test_ranks import host
from tests.planner.test_simulate_ranks import BESIDE, CARDS, HOPS, WORDS, as_promised, with_cpu
from tests.planner.test_unlike_cards import slower, unlike

WHOLE = model(layers=24)


def copy(layers: int = 24, attn: int = 11 * MB, ffn: int = 33 * MB) -> Speculation:
    """A model that drafts, a quarter of ``WHOLE`` unless it is smaller."""
    return Speculation(Drafter.self, 0, 0.8, replace(model(layers, attn, ffn), name="copy"))


CASES: dict[str, tuple[HardwareProfile, int, Workload, Speculation]] = {
    "two ranks that stream": (host(vram=1800 * MB, **CARDS), 2, work(), copy()),
    "the others have room": (host(vram=2400 * MB, **CARDS), 2, work(), copy()),
    "recorded": (host(vram=1800 * MB, **WORDS), 3, work(), copy()),
    "a server": (host(vram=1800 * MB, **CARDS), 2, work(batch=3, clients=4, requests=8), copy()),
}


def beside(hardware: HardwareProfile, ranks: int, asked: Workload, drafter: Speculation) -> Plan:
    return plan_dealt(Question(hardware, WHOLE, asked, ranks=ranks), Speculate.self, drafter)


@pytest.mark.parametrize(("hardware", "ranks", "asked", "drafter"), [*CASES.values()][-2:], ids=[*CASES][-2:])
def test_fewer_layers_on_the_drafters_rank_give_more_tokens_as_promised(
    hardware: HardwareProfile, ranks: int, asked: Workload, drafter: Speculation, monkeypatch: pytest.MonkeyPatch
) -> None:
    even = Dealing.even(ranks, WHOLE.layers)
    plan = beside(hardware, ranks, asked, drafter)
    assert sum(plan.dealing.counts) == WHOLE.layers and plan.dealing.counts[0] < even.counts[0]
    assert not any(broken_rules(one.hardware, one.model, one.workload, one.decisions) for one in plan.each_rank)
    assert all("drafter" not in vram_use(*terms(one)) for one in plan.each_rank[1:]) and "drafter" in vram_use(*terms(plan.of_rank(0)))
    assert plan_of_text(plan_text(plan)) == plan
    if not asked.is_served:
        as_promised(plan, 0.09, 0.07)
    monkeypatch.setattr(speculation_choice, "dealt_beside", lambda usual, tried: (usual, tried(usual) and ""))
    usual = beside(hardware, ranks, asked, drafter)
    assert usual.dealing == even
    rate, usual_rate = plan.prediction.decode_tokens_per_s, usual.prediction.decode_tokens_per_s
    assert rate > usual_rate * 1.005
    said = f"rank 0 has {plan.dealing.counts[0]} of 24 layers, since the drafter lies there: {rate:.3g} tokens/s, {usual_rate:.3g} with "
    assert plan.notes[-1] == f"{said}{even.counts[0]}"


def terms(plan: Plan) -> tuple[Any, ...]:
    return plan.hardware, plan.model, plan.workload, plan.decisions


def test_no_other_number_of_layers_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    case: tuple[Any, ...] = CASES["two ranks that stream"]
    found: dict[int, float] = {}

    def each(usual: Dealing, tried: Any) -> tuple[Dealing, str]:
        for first in {1, usual.counts[0], *range(max(1, best - 2), min(best + 3, usual.counts[0]))}:
            found[first] = tried(usual.sparing(first)).prediction.decode_tokens_per_s
        return usual, ""

    chosen = beside(*case)
    best = chosen.dealing.counts[0]
    monkeypatch.setattr(speculation_choice, "dealt_beside", each)
    beside(*case)
    assert chosen.prediction.decode_tokens_per_s == pytest.approx(max(found.values()), rel=0.005)


def test_a_rank_without_the_drafter_waits_while_it_drafts() -> None:
    plan = beside(*CASES["the others have room"])
    drafting = drafter_alone(*terms(plan.of_rank(0)))
    assert drafting is not None
    own = plan.of_rank(1)
    assert own.prediction.decode_s_per_token == plan.prediction.decode_s_per_token
    waited_s = plan.decisions.speculation.tokens * drafting.decode_s
    alone = predict(*terms(own))
    assert plan.prediction.decode_s_per_token > alone.decode_s_per_token + 0.8 * waited_s, "but for what its link brings meanwhile"


def test_layers_stay_even_where_fewer_on_the_first_rank_give_nothing() -> None:
    roomy = host(vram=8 * GB, **CARDS)
    for question, drafter in (
        (Question(roomy, WHOLE, work(), ranks=2), copy()),
        (Question(host(vram=700 * MB, **CARDS), WHOLE, work(), ranks=2), copy(2)),
        (Question(host(vram=1800 * MB, **CARDS), replace(WHOLE, vocab=20), work(), ranks=2), copy()),
    ):
        plan = plan_dealt(question, Speculate.self, drafter)
        assert plan.dealing.is_even and not any("rank 0" in note for note in plan.notes)
    assert may_spare(Question(roomy, WHOLE, work(), ranks=2)) and not may_spare(Question(roomy, WHOLE, work(), Force(host_ffn=1), ranks=2))


@pytest.mark.parametrize("hops", HOPS)
def test_units_of_the_cpu_are_planned_beside_a_drafter_where_recorded_steps_hand_them_over(hops: str) -> None:
    """And then only where they give more than fewer layers on rank 0. A launched step that verifies hands none over."""
    hardware = with_cpu(vram_bytes=1600 * MB, links=HOPS[hops])
    plan = plan_dealt(Question(hardware, BESIDE, work(), ranks=2), Speculate.self, copy(2))
    units = [one.decisions.weights.host.ffn for one in plan.each_rank]
    assert len(set(units)) == 1 and (units[0] > 0) == (hops == "recorded")
    assert not any(broken_rules(*terms(one)) for one in plan.each_rank)
    as_promised(plan, 0.07, 0.07)
    if units[0]:
        said = f"the CPU computes {units[0]} FFN units of each rank, with layers as usually dealt: "
        rate, without = map(float, re.findall(r"[\d.]+", plan.notes[-1].removeprefix(said)))
        assert rate == pytest.approx(plan.prediction.decode_tokens_per_s, rel=5e-3) and rate > without


def test_a_drafter_that_leaves_no_room_for_half_the_layers_leaves_it_for_fewer() -> None:
    question = Question(host(vram=3900 * MB, **CARDS), WHOLE, work(batch=16, requests=16, context_tokens=8192), ranks=4)
    plan = plan_dealt(question, Speculate.self, copy(2, 150 * MB, 450 * MB))
    assert plan.dealing.counts[0] < 6 and plan.notes[-1].endswith("tokens/s, no plan with 6")


def test_the_first_of_unlike_cards_gives_layers_for_a_drafter_too() -> None:
    question = with_counts(Question(unlike(2 * GB, Card(1, 2 * GB, slower(2))), WHOLE, work(), ranks=2))
    plan = plan_dealt(question, Speculate.self, copy())
    assert question.layers[0] > 12 and plan.dealing.counts[0] < question.layers[0]
    assert plan.notes[-1].endswith(f" with {question.layers[0]}")
    assert not any(broken_rules(*terms(one)) for one in plan.each_rank)


def test_a_drafter_in_dram_takes_the_place_of_layers_there() -> None:
    question = Question(host(vram=0, dram=5 * GB), WHOLE, work(new_tokens=8), ranks=2)
    plan = plan_dealt(question, Speculate.self, copy())
    assert plan.dealing.counts[0] < 12


@given(st.integers(2, 6), st.integers(0, 60), st.data())
def test_a_dealing_that_spares_the_first_rank_deals_all_layers_and_shares_its_host_evenly(count: int, more: int, data: Any) -> None:
    even = Dealing.even(count, count + more)
    first = data.draw(st.integers(1, even.counts[0]))
    spared = even.sparing(first)
    assert spared.counts[0] == first and spared.layers == even.layers and even.sparing(even.counts[0]) == even
    assert max(spared.counts[1:]) - min(spared.counts[1:]) <= 1 and (spared.is_even or spared.spares_first)
    assert len(set(host_shares(host(vram=2 * GB, **CARDS), model(layers=even.layers), spared))) == 1
    assert Dealing((4, 8, 4)).sparing(2).counts == (2, 9, 5) and not Dealing((4, 8, 4)).spares_first


def test_explain_counts_what_the_drafter_takes_and_says_why_layers_are_dealt_so(tmp_path: Path) -> None:
    question = Question(host(vram=1000 * MB, **CARDS), model(layers=6), work(), ranks=2)
    plan = plan_dealt(question, Speculate.self, copy(6, 20 * MB, 60 * MB))
    asked = question_of(plan)
    assert asked.layers == plan.dealing.counts and asked.layers[0] < 3
    assert asked.taken[0] > 0.8 * plan.decisions.speculation.model.weight_bytes
    write_plan(plan, tmp_path / "plan.yaml")
    said = command("planner", "explain", "plan=plan.yaml", cwd=tmp_path)
    assert f"note: {plan.notes[-1]}" in said.stdout, said.stderr
    assert "No plan is faster" in said.stdout


def test_solve_says_how_many_layers_lie_beside_the_drafter_and_replan_deals_without_it(tmp_path: Path) -> None:
    keys = (
        "hardware=h100x2",
        "model=llama8b",
        "model.layers=8",
        "hardware.vram_bytes=4GiB",
        "speculate=self",
        "workload.context_tokens=0",
        "force.vram_ffn_slots=0",
    )
    done = command("planner", "solve", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "since the drafter lies there" in done.stdout and "beside the drafter on rank 0" in done.stdout
    again = command("planner", "replan", "plan=plan.yaml", "out=again.yaml", cwd=tmp_path)
    plan, without = read_plan(tmp_path / "plan.yaml"), read_plan(tmp_path / "again.yaml")
    assert again.returncode == 0 and plan.dealing.counts[0] < 4 and without.dealing.is_even and without.drafter is None
