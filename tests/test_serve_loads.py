"""The loads of bench/serve.py: how long they are, and what their rows tell apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.cases import Row
from bench.serve_loads import CUTS, Load, Loads, PassesOf, ScaledPrices
from bench.serve_plans import ServePlans, settled
from bench.serve_rig import parse_metrics
from bench.serve_turns import mean_gap
from bench.sse import Reply
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serving_forecast import Spread, planned_load, simulate_serving
from penstock.planner.solver.planning import answer
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, machine, model, work


@pytest.fixture(scope="module")
def plan() -> Plan:
    asked = work(batch=8, requests=1, prompt_tokens=128, new_tokens=64, clients=8, queue=64)
    return answer(Question(machine(GB, 8 * GB), model(24), asked))


def loads(plan: Plan, seconds: float) -> Loads:
    def row(case: str, what: str, result: float, limit: float, unit: str, target: str, near: float | None = None, **more: float) -> Row:
        return Row(case, what, result, limit, unit, more.get("ratio", result / limit), target, near, 0, 0)

    return Loads(cast(ServePlans, SimpleNamespace(served=plan, prompt=128, new=64, clients=8, seconds=seconds, given={}, row=row)))


@pytest.mark.parametrize("clients", [1, 3, 8, 16])
def test_a_closed_loop_takes_about_as_long_as_it_may(plan: Plan, clients: int) -> None:
    """With time, replies are whole; without, they are shorter, and no fewer requests are asked than rates want."""
    rows = ServeLimits.of(plan).rows
    whole, seconds = loads(plan, 1000.0).looped(clients, rows)
    assert whole.lengths.new_tokens == 64 and seconds.seconds == pytest.approx(1000, rel=0.25)
    pass_s = PassPrices(plan).decode_s(1, 160)
    for most_s in (300 * pass_s, 1 * pass_s):
        arrivals, forecast = loads(plan, most_s).looped(clients, rows)
        assert arrivals.requests >= max(clients + min(rows, clients), 3 * min(rows, clients)) and forecast.requests == arrivals.requests
        assert forecast.seconds <= 1.5 * most_s or arrivals.lengths.new_tokens == 64 // CUTS[-1]


PAGE = """
penstock_kind_passes_total{kind="prompt"} %d.0
penstock_kind_pass_seconds_total{kind="prompt"} %f
penstock_kind_predicted_pass_seconds_total{kind="prompt"} %f
penstock_kind_longest_pass_seconds{kind="prompt"} %f
"""


def test_passes_of_a_load_are_those_since_it_began() -> None:
    before, after = (parse_metrics(PAGE % told) for told in ((10, 5.0, 4.0, 1.5), (30, 11.0, 9.0, 1.5)))
    found = PassesOf.of(before, after, "prompt")
    assert found == PassesOf(20, 6.0, 5.0, None) and found.share == pytest.approx(1.2)
    assert PassesOf.of({}, after, "prompt").longest_s == 1.5
    assert PassesOf.of(before, after, "decode") == PassesOf(0, 0, 0, None)


def test_wrong_prices_are_told_from_a_wrong_scheduler(plan: Plan) -> None:
    """Passes with prompts take 1.5 times as long as the plan says, and nothing else is wrong."""
    made = loads(plan, 20.0)
    arrivals = made.arrivals(120, 0.7 * planned_load(plan, made.arrivals(64, new=16)), new=16)
    limits, slow = ServeLimits.of(plan), ScaledPrices(plan, 1.0, 1.5)
    forecast, measured = simulate_serving(plan, arrivals), simulate_serving(plan, arrivals, limits, slow).ttft_s
    kinds = {"prompt": PassesOf(50, 15.0, 10.0, 0.9), "decode": PassesOf(70, 7.0, 7.0, None)}

    def rows_of(ttft_s: Spread) -> dict[str, Row]:
        made._poisson = lambda *_: Load(arrivals, forecast, ttft_s, kinds, "")  # type: ignore[method-assign]
        return {row.case.strip(): row for row in made.ninety()}

    found = rows_of(measured)
    assert found["TTFT p50 at 90%"].ratio > 1.25
    assert found["TTFT p50, passes as measured"].ratio == found["TTFT p99, passes as measured"].ratio == pytest.approx(1.0)
    assert found["pass with a prompt"].predicted == pytest.approx(1 / 1.5) and "the longest 0.9 s" in found["pass with a prompt"].what
    assert found["pass without"].predicted == 1.0
    late = rows_of(Spread(9.0, 9.0, 9.0))
    assert late["TTFT p50, passes as measured"].ratio > 1.25


def test_scaled_prices_are_the_plans_times_a_share(plan: Plan) -> None:
    plain, scaled = PassPrices(plan), ScaledPrices(plan, 2.0, 3.0)
    for mixed, share in ((MixedPass(4, 200.0, 0, 0.0), 2.0), (MixedPass(4, 200.0, 64, 32.0), 3.0)):
        assert scaled.seconds(mixed) == pytest.approx(share * plain.seconds(mixed))


def reply(begun_s: float, first_s: float, between_s: float, tokens: int) -> Reply:
    times = [first_s + k * between_s for k in range(tokens)]
    made: Any = Reply(begun_s)
    made.times_s, made.tokens, made.ended_s = times, tokens, times[-1]
    return cast(Reply, made)


def test_the_rate_of_a_closed_loop_is_that_between_whole_waves() -> None:
    """4 clients in lockstep: each wave of 4 takes 10 s and gives 40 tokens, the first and the last among them."""
    replies = [reply(10.0 * wave, 10.0 * wave + 1.0, 1.0, 10) for wave in range(6) for _ in range(4)]
    assert settled(replies, 4) == pytest.approx(4.0)


def test_gaps_beside_second_turns_are_those_of_their_time() -> None:
    assert mean_gap([[0.0, 1.0, 2.0, 5.0], [6.0, 8.0]], 1.0, 7.0) == pytest.approx((1 + 3) / 2)
    with pytest.raises(SystemExit, match="no row decoded"):
        mean_gap([[0.0, 1.0]], 2.0, 3.0)
