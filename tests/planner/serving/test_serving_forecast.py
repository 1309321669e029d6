"""Arrivals played through the scheduler, at the prices of the plan."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.serving.arrivals import Arrivals, Lengths
from penstock.planner.contract.serving.counted_pages import CountedPages
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serving_forecast import planned_load, simulate_serving
from penstock.planner.solver.planning import answer
from penstock.planner.solver.terms.problem import Question
from tests.planner.small import GB, MB, machine, model, work

LIMITS = ServeLimits(8, 264, 16, 400, 64)
LENGTHS = Lengths(200, 40, 0.5)


@pytest.fixture(scope="module", params=["card", "cpu", "experts"])
def plan(request):
    vram, experts = {"card": (GB, 0), "cpu": (0, 0), "experts": (GB, 4)}[request.param]
    question = Question(machine(vram, 4 * GB), model(24, experts=experts), work(batch=4, requests=4, prompt_tokens=256))
    return answer(question)


def test_a_pass_costs_what_the_plan_predicts_of_it(plan):
    prices, made, work = PassPrices(plan), plan.decisions, plan.workload
    step_s = prices.decode_s(made.batch, work.prompt_tokens + work.new_tokens / 2)
    assert step_s == pytest.approx(plan.prediction.decode_s_per_token, rel=1e-3)
    alone = answer(Question(plan.hardware, plan.model, replace(work, batch=1, requests=1)))
    whole = PassPrices(alone).mixed_s(MixedPass(0, 0, work.prompt_tokens, work.prompt_tokens / 2))
    assert alone.decisions.prefill_chunk_tokens == work.prompt_tokens
    assert whole == pytest.approx(alone.prediction.prefill_s, rel=1e-6)


def test_more_in_a_pass_never_takes_less(plan):
    prices = PassPrices(plan)
    with_prompts = [prices.seconds(MixedPass(8, 300, tokens, tokens / 2)) for tokens in (1, 64, 256, 1024)]
    rows = [prices.decode_s(rows, 300) for rows in (1, 2, 4, 8)]
    longer = [prices.decode_s(4, context) for context in (1, 255, 256, 257, 1000)]
    for seconds in (with_prompts, rows, longer):
        assert seconds == sorted(seconds)


def test_limits_follow_from_any_plan(plan):
    limits, made = ServeLimits.of(plan), plan.decisions
    assert (limits.rows, limits.page_tokens, limits.queue) == (made.batch, made.kv.page_tokens, plan.workload.queue)
    assert limits.capacity_tokens >= made.batch * plan.workload.max_tokens
    assert made.batch < limits.pass_tokens <= made.batch * made.prefill_chunk_tokens


def test_every_request_is_answered_at_the_rate_at_which_they_come(plan):
    arrivals, prices = Arrivals(LENGTHS, 400), PassPrices(plan)
    load = planned_load(plan, arrivals, LIMITS, prices)
    calm, busy, over = (simulate_serving(plan, arrivals.at_rate(share * load), LIMITS, prices) for share in (0.5, 0.9, 1.5))
    assert calm.requests == 400 and calm.refused == 0
    assert calm.requests_per_s == pytest.approx(load / 2, rel=0.15)
    assert over.requests_per_s == pytest.approx(load, rel=0.1), "no more than it can"
    assert calm.ttft_s.p50 <= busy.ttft_s.p50 <= over.ttft_s.p50
    assert calm.ttft_s.p50 <= 3 * max(calm.pass_s.p99, calm.pass_s.p50), "at half the load nobody waits for others"
    assert calm == simulate_serving(plan, arrivals.at_rate(0.5 * load), LIMITS, prices), "the same seed, the same day"


def test_the_planned_load_of_equal_requests_does_not_depend_on_how_many_are_played(plan):
    """They end in waves of as many as there are rows: their answers may not be counted from one wave's begin to another's end."""
    prices, lengths = PassPrices(plan), Lengths(200, 40)
    played = simulate_serving(plan, Arrivals(lengths, 2000, clients=2 * LIMITS.rows), LIMITS, prices)
    for requests in (16, 64, 100, 256, 1000):
        load = planned_load(plan, Arrivals(lengths, requests), LIMITS, prices)
        assert load == pytest.approx(2000 / played.seconds, rel=0.02), f"all of them over all the time, with {requests}"


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_a_queue_grows_beyond_the_planned_load_alone(plan, spread):
    prices, arrivals = PassPrices(plan), Arrivals(Lengths(200, 40, spread), 600)
    load = planned_load(plan, arrivals, LIMITS, prices)
    waits = [simulate_serving(plan, arrivals.at_rate(share * load), LIMITS, prices).ttft_s for share in (0.9, 1.1)]
    request_s = LIMITS.rows / load
    assert waits[0].mean < request_s < 2 * waits[1].p99, "seconds of one request, beyond which a wait is no chance any more"


def test_a_closed_loop_holds_as_many_as_there_are_clients(plan):
    prices, lengths = PassPrices(plan), Lengths(200, 40)
    found = {n: simulate_serving(plan, Arrivals(lengths, 160, clients=n), LIMITS, prices) for n in (1, 4, 8, 16)}
    assert all(forecast.requests == 160 for forecast in found.values())
    assert found[1].rows <= 1 < found[4].rows <= 4 < found[8].rows <= 8
    rates = [forecast.tokens_per_s for forecast in found.values()]
    assert rates[0] < rates[1] < rates[2]
    for clients in (1, 4, 8):  # Little's law: clients = rate * seconds of a request
        seconds = found[clients].ttft_s.mean + 39 * found[clients].between_s.mean
        assert found[clients].requests_per_s * seconds == pytest.approx(clients, rel=0.1)


def test_a_client_that_asks_again_finds_that_the_next_pass_has_begun(plan):
    prices, arrivals = PassPrices(plan), Arrivals(LENGTHS, 160, clients=4)
    found, at_once = (simulate_serving(plan, one, LIMITS, prices) for one in (arrivals, replace(arrivals, turn_s=0.0)))
    assert found.ttft_s.p50 > at_once.ttft_s.p50 + 0.5 * found.pass_s.p50
    assert found.requests == at_once.requests == 160 and found.seconds > at_once.seconds


def test_a_common_system_prompt_is_computed_once_and_stored_once(plan):
    """Beside as many tokens that are no one else's, and beside prompts of the rest alone."""
    prices, page = PassPrices(plan), LIMITS.page_tokens
    shared = 60 * page
    whole, alike, rest = (
        simulate_serving(plan, Arrivals(lengths, 200, clients=8), LIMITS, prices)
        for lengths in (Lengths(shared + 40, 20), Lengths(shared + 40, 20, shared_tokens=shared + 3), Lengths(40, 20))
    )
    assert alike.requests == 200 and rest.requests_per_s >= alike.requests_per_s > 1.2 * whole.requests_per_s
    assert alike.ttft_s.p50 < whole.ttft_s.p50 and alike.passes < whole.passes


@settings(max_examples=60)
@given(st.data())
def test_shared_pages_are_counted_once(data):
    pages, held = CountedPages(12, 4, 9), dict[int, int]()
    for _ in range(30):
        number = data.draw(st.integers(0, 3))
        act = data.draw(st.sampled_from(("begin", "hold", "keep", "trim", "release")))
        if act == "begin" and number not in held:
            held[number] = pages.prefix(number)
            assert held[number] in (0, 8)
        elif act == "hold" and number in held:
            tokens = held[number] + data.draw(st.integers(1, 12))
            held[number] = tokens if pages.hold(number, tokens) else held[number]
        elif act == "keep" and held.get(number, 0) >= 9:
            pages.keep(number)
        elif act == "trim" and held.get(number, 0) > 9:
            held[number] = 9
            pages.trim(number, 9)
        elif act == "release":
            held.pop(number, None)
            pages.release(number)
        sharers = pages._sharers
        own = sum(-(-tokens // 4) - 2 * (n in sharers) for n, tokens in held.items())
        assert pages.free == 12 - own - 2 * bool(sharers) and pages.free >= 0 and sharers <= set(held)
    for number in range(4):
        pages.release(number)
    assert pages.free == 12


def test_a_pool_that_is_short_is_played_too():
    plan = answer(Question(machine(GB, 4 * GB), model(8, MB, MB), work()))
    short = ServeLimits(8, 72, 16, 24, 4)
    found = simulate_serving(plan, Arrivals(Lengths(64, 100), 40, per_s=1000.0), short)
    assert found.given_up and found.refused
    assert found.requests + found.refused == 40
