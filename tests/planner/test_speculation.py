"""How long chains of drafts are: the formula, what is learnt, and when drafting stops."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.planner.contract.serving.arrivals import Arrivals
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_drafts import PlannedDrafts
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serving_forecast import simulate_serving
from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import TRIALS, ChainLength
from penstock.planner.contract.speculation.drafting import expected_tokens


@given(st.floats(0, 1), st.integers(0, 15))
def test_a_pass_gives_the_tokens_of_the_formula(acceptance: float, drafts: int) -> None:
    assert expected_tokens(acceptance, drafts) == pytest.approx(sum(acceptance**k for k in range(drafts + 1)))


@given(st.floats(0.05, 0.95), st.integers(0, 2**16))
def test_the_share_of_kept_drafts_is_learnt(right: float, seed: int) -> None:
    draw, known = random.Random(seed), Acceptance(0.5)
    for _ in range(400):
        kept = next((k for k in range(4) if draw.random() >= right), 4)
        known.book(4, kept)
    assert known.share == pytest.approx(right, abs=0.2)


def test_chains_are_long_where_rows_are_free_and_short_where_each_costs_a_pass() -> None:
    assert ChainLength(15, lambda drafts: 1.0, Acceptance(0.6)).best == 15
    assert ChainLength(15, lambda drafts: 1.0 + drafts, Acceptance(0.6)).best == 0
    assert 0 < ChainLength(15, lambda drafts: 1.0 + 0.1 * drafts, Acceptance(0.6)).best < 15


@given(st.floats(0.0, 0.6), st.floats(0.7, 3.0))
@settings(max_examples=30, deadline=None)
def test_where_drafting_does_not_pay_trials_take_no_more_than_their_share(right: float, each: float) -> None:
    """Although the plan says that rows are free."""
    draw = random.Random(1)
    length = ChainLength(4, lambda drafts: 1.0, Acceptance(right))
    spent = tokens = 0.0
    for passed in range(1500):
        drafts = length.choose()
        kept = next((k for k in range(drafts) if draw.random() >= right), drafts)
        length.acceptance.book(drafts, kept)
        length.took(drafts, 1.0 + each * drafts)
        if passed >= 100:
            spent, tokens = spent + 1.0 + each * drafts, tokens + 1 + kept
    assert tokens / spent >= 1 - 3 * TRIALS


def test_drafting_stops_when_passes_take_longer_and_comes_back() -> None:
    length, each = ChainLength(4, lambda drafts: 1.0, Acceptance(0.6)), {"s": 0.0}
    chosen: list[int] = []
    for passed in range(3000):
        each["s"] = 2.0 if 500 <= passed < 1000 else 0.0
        drafts = length.choose()
        length.acceptance.book(drafts, int(0.6 * drafts))
        length.took(drafts, 1.0 + each["s"] * drafts)
        chosen.append(drafts)
    assert max(chosen[400:500]) == 4
    assert sum(chosen[600:1000]) < 10
    assert sum(drafts > 0 for drafts in chosen[2000:]) > 900


def test_auto_drafts_where_the_link_binds_and_not_where_each_row_visits_other_experts() -> None:
    dense = penstock.solve(model="llama70b", hardware="rtx5080", speculate="auto")
    routed = penstock.solve(model="mixtral8x7b", hardware="rtx4090", speculate="auto")
    assert dense.decisions.speculation.tokens > 0
    assert dense.prediction.decode_tokens_per_s * dense.prediction.decode_s_per_token == pytest.approx(dense.prediction.tokens_a_pass)
    assert routed.decisions.speculation.tokens == 0
    assert any("no tokens are drafted" in note for note in routed.notes)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"force.speculate_tokens": 4}, "force.speculate_tokens=4: nobody drafts"),
    ],
)
def test_drafts_that_nobody_would_use_are_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(penstock.UserError, match=said):
        penstock.solve(model="llama8b", hardware="rtx4090", **keys)


def test_a_server_drafts_less_the_more_rows_it_has_and_is_forecast_to_be_faster_by_what_is_kept() -> None:
    plain = penstock.solve(model="llama8b", hardware="rtx4090", workload="serve")
    drafted = penstock.solve(model="llama8b", hardware="rtx4090", workload="serve", speculate="auto")
    planned = PlannedDrafts(drafted, ServeLimits.of(drafted), PassPrices(drafted))
    lengths = [planned.length(rows) for rows in (1, 32)]
    assert lengths[0] == drafted.decisions.speculation.tokens > lengths[-1] > 0
    assert f"{lengths[0]} behind a row that is alone, {lengths[-1]} behind each of 32 rows" in drafted.notes[-1]
    assert 1 < drafted.prediction.tokens_a_pass <= expected_tokens(0.3, lengths[-1])
    assert drafted.prediction.total_s < plain.prediction.total_s
    arrivals = Arrivals.of(drafted.workload, 60)
    before, after = simulate_serving(plain, arrivals), simulate_serving(drafted, arrivals)
    assert (before.drafted, before.kept) == (0, 0) and after.requests == before.requests == 60
    assert 0.9 * (expected_tokens(0.3, lengths[0]) - 1) / lengths[0] < after.kept / after.drafted < 0.3, (
        "what stands behind a wrong draft is not kept either"
    )
    assert after.tokens_per_s > before.tokens_per_s
