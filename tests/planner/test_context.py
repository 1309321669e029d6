"""How long a sequence may become: planned for, predicted for, and what the model is made for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.planner.asked.verb_schema import ReplanConfig
from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.contract.prices.sizes import pages_per_sequence
from penstock.planner.solver.context_limit import within_limit
from penstock.planner.solver.program import solve
from penstock.planner.verbs.replan_verb import replan_verb
from tests.planner.small import model as small_model
from tests.support import machine, workload

ROOMY = workload(prompt_tokens=100, new_tokens=20, context_tokens=1000)


def test_room_is_planned_for_and_seconds_are_not() -> None:
    model, hardware = small_model(), machine()
    short = replace(ROOMY, context_tokens=0)
    roomy, tight = (solve(hardware, model, work) for work in (ROOMY, short))
    assert roomy.kv.pages == model.layers * pages_per_sequence(ROOMY, roomy.kv.page_tokens) > tight.kv.pages
    assert roomy.kv.pages * roomy.kv.page_tokens >= 1000 * model.layers
    decided = replace(tight, kv=roomy.kv)
    seconds, usual = predict(hardware, model, ROOMY, decided), predict(hardware, model, short, tight)
    assert seconds.decode_s_per_token == pytest.approx(usual.decode_s_per_token, rel=0.01), "KV that is read is what was computed"
    assert seconds.prefill_s == pytest.approx(usual.prefill_s, rel=0.01) and seconds.dram_bytes > usual.dram_bytes


def test_a_model_is_asked_for_no_more_than_it_is_made_for() -> None:
    model = replace(small_model(), max_tokens=500)
    clipped, (note,) = within_limit(ROOMY, model)
    assert clipped == replace(ROOMY, context_tokens=500) and "500 tokens" in note
    assert within_limit(ROOMY, replace(model, max_tokens=0)) == (ROOMY, ()) == within_limit(ROOMY, replace(model, max_tokens=1000))
    with pytest.raises(UserError, match=r"is made for sequences of 110 tokens.*set workload.prompt_tokens=90$"):
        within_limit(ROOMY, replace(model, max_tokens=110))
    with pytest.raises(UserError, match=r"is made for sequences of 1 token .*restore the model's own config.json$"):
        within_limit(ROOMY, replace(model, max_tokens=1))


def test_a_plan_is_solved_again_for_a_longer_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, hardware = replace(small_model(), max_tokens=4000), machine()
    made = solve(hardware, model, ROOMY)
    write_plan(Plan(hardware, model, ROOMY, made, predict(hardware, model, ROOMY, made)), tmp_path / "plan.yaml")
    replan_verb(ReplanConfig(plan=str(tmp_path / "plan.yaml"), context_tokens=3000, out=str(tmp_path / "longer.yaml")))
    again = read_plan(tmp_path / "longer.yaml")
    assert again.workload == replace(ROOMY, context_tokens=3000) and "context 3000" in capsys.readouterr().out
    with pytest.raises(UserError, match="^context_tokens=5000: small is made for sequences of 4000 tokens"):
        replan_verb(ReplanConfig(plan=str(tmp_path / "plan.yaml"), context_tokens=5000, out=str(tmp_path / "longer.yaml")))
