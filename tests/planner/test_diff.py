"""`planner diff`: only what differs, with ratios, of plans as their files have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.solver.planning import answer
from penstock.planner.solver.terms.problem import Question
from penstock.planner.verbs.plan_diff import Part, PlanDiff, compare, document
from tests.cli import command, refusal
from tests.planner.small import GB, MB, blocks, machine, model, with_units, work

QUESTION = Question(machine(vram=1500 * MB, dram=2 * GB), model(24), work())


@pytest.fixture(scope="module")
def plan() -> Plan:
    return answer(QUESTION)


def names(comparison: PlanDiff, part: Part) -> dict[str, float | None]:
    return {d.name: d.ratio for d in comparison.differences if d.part is part}


def test_a_plan_does_not_differ_from_itself_nor_from_its_file(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "plan.yaml")
    assert compare(plan, plan).differences == ()
    assert compare(plan, read_plan(tmp_path / "plan.yaml")).differences == ()


def test_a_smaller_cache_differs_in_its_counts_and_in_what_follows(plan: Plan) -> None:
    cap = plan.decisions.weights.dram.cap_layers
    other = answer(replace(QUESTION, force=Force(cap_layers=cap - 1)))
    found = compare(plan, other)
    decided, predicted = names(found, Part.decided), names(found, Part.predicted)
    assert decided["weights.dram.cap_layers"] == pytest.approx((cap - 1) / cap)
    assert "weights.policy" not in decided and "batch" not in decided
    slower = other.prediction.decode_s_per_token / plan.prediction.decode_s_per_token
    assert predicted["predicted.decode_s_per_token"] == pytest.approx(slower, rel=1e-4) and slower > 1
    assert predicted["predicted.decode_tokens_per_s"] == pytest.approx(1 / slower, rel=1e-4)
    assert not names(found, Part.assumed), "the same machine, model and work"


def test_another_machine_is_an_assumption_that_differs_but_not_its_origins(plan: Plan) -> None:
    hardware = replace(QUESTION.hardware, dram_bytes=3 * GB, origin={"dram_bytes": "set by hand"})
    found = compare(plan, answer(QUESTION.on(hardware)))
    assert names(found, Part.assumed) == {"hardware.dram_bytes": pytest.approx(1.5)}


def test_what_only_one_plan_has_is_shown_without_a_ratio(plan: Plan) -> None:
    found = compare(plan, answer(replace(QUESTION, model=model(8, ffn=480 * MB, experts=8))))
    slots = next(d for d in found.differences if d.name == "experts.dram_slots")
    assert slots.a is None and slots.b > 0 and slots.ratio is None
    policy = next(d for d in found.differences if d.name == "experts.policy")
    assert policy.b == "mix" and json.loads(json.dumps(document(found)))["same"] is False


def test_units_are_compared_by_kind_and_by_layers_where_they_differ(plan: Plan) -> None:
    larger = compare(plan, answer(replace(QUESTION, model=model(24, ffn=180 * MB))))
    assert {name: ratio for name, ratio in names(larger, Part.assumed).items()} == {
        "model.units.ffn.stored_bytes": pytest.approx(1.5),
        "model.units.ffn.elements": pytest.approx(1.5),
    }
    unequal = with_units(QUESTION.model, *blocks(UnitKind.ffn, (120 * MB,) * 20 + (60 * MB,) * 4))
    found = {d.name: d.b for d in compare(plan, answer(replace(QUESTION, model=unequal))).differences}
    assert found["model.units.ffn 20-23.stored_bytes"] == 60 * MB


def test_a_broken_plan_is_named_since_its_prediction_is_old(plan: Plan) -> None:
    broken = replace(plan, decisions=Force(cap_layers=22).apply(plan.decisions, 24))
    found = compare(plan, broken)
    assert found.broken_a == () and "DRAM: the plan needs" in found.broken_b[0]


@pytest.mark.parametrize("change", [{"batch": 0}, {"prefill_chunk_tokens": 0}])
def test_a_plan_of_which_nothing_can_be_predicted_is_compared_all_the_same(change: dict[str, int], plan: Plan) -> None:
    broken = replace(plan, decisions=replace(plan.decisions, **change))
    found = compare(broken, plan)
    assert found.broken_a and found.broken_b == ()
    assert names(found, Part.decided).keys() == change.keys()
    assert {name for name in names(found, Part.predicted) if "nine_in_ten" not in name} == set()


def test_how_tokens_are_drafted_is_decided_too(plan: Plan) -> None:
    drafting = replace(plan, decisions=replace(plan.decisions, speculation=Speculation(Drafter.lookup, 4, 0.3)))
    drafts = {d.name: (d.a, d.b) for d in compare(plan, drafting).differences if d.part is Part.decided}
    assert drafts["speculation.drafter"] == (None, "lookup") and drafts["speculation.tokens"] == (None, 4)


def test_diff_shows_a_table_and_ends_with_json(plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "a.yaml")
    text = (tmp_path / "a.yaml").read_text()
    assert plan.decisions.prefill_chunk_tokens == 512
    (tmp_path / "b.yaml").write_text(text.replace("prefill_chunk_tokens: 512", "prefill_chunk_tokens: 256"))
    result = command("planner", "diff", "a.yaml", "b.yaml", "out=d.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    *told, last = result.stdout.splitlines()
    rows = [line.split() for line in told]
    assert ["prefill_chunk_tokens", "512", "256", "0.5"] in rows and "\x1b" not in result.stdout and max(map(len, told)) <= 80
    found = json.loads(last)
    assert json.loads((tmp_path / "d.json").read_text()) == found and found["a"] == "a.yaml" and found["b"] == "b.yaml"
    row = next(d for d in found["differences"] if d["name"] == "predicted.ttft_s")
    assert row["part"] == "predicted" and row["ratio"] == pytest.approx(row["b"] / row["a"], rel=1e-4)
    same = command("planner", "diff", "a.yaml", "a.yaml", cwd=tmp_path)
    assert "The plans are the same." in same.stdout and json.loads(same.stdout.splitlines()[-1])["same"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["a=... is required"]),
        (("a.yaml",), ["b=... is required"]),
        (("a.yaml", "none.yaml"), ["b=none.yaml: no such file"]),
        (("odd.yaml", "a.yaml"), ["a=odd.yaml: not a plan"]),
        (("a.yaml", "a.yaml", "c.yaml"), ["c.yaml"]),
    ],
)
def test_what_is_no_pair_of_plans_is_refused(arguments: tuple[str, ...], words: list[str], plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "a.yaml")
    (tmp_path / "odd.yaml").write_text("x: 1\n")
    line = refusal("planner", "diff", *arguments, cwd=tmp_path)
    for word in words:
        assert word in line
