"""The CPU's threads read ahead of the next unit while the card computes: what the law counts on, and what is simulated."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from penstock.planner.common.timeline.spans import CPU, H2D
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.formats import KNOWN_FORMATS
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.price import Resource
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.lanes.host_lane import HostLane, OnHost
from penstock.planner.simulate.lanes.lanes import Lanes, Work
from penstock.planner.solver.program import solve
from tests.planner.small import work
from tests.planner.test_host_units import RATES, M, beside

AHEAD = 400_000
"""Bytes of each of 12 threads: 4.8 of 50 MB."""
A, B = Unit("ffn", 0), Unit("ffn", 1)


def prices(ahead_bytes: int, **change: object) -> Beside:
    h = beside(replace(RATES, ahead_bytes=ahead_bytes))
    return replace(Beside.of(h, M, 1, solve(h, M, work()).weights.forms), **change)


def ffn(form: str = "BF16") -> UnitSpec:
    return replace(M.of_kind(UnitKind.ffn)[0], format=KNOWN_FORMATS[form])


def test_a_units_price_is_less_by_what_is_read_while_the_card_computes() -> None:
    """First what the hop hides, of the CPU's own seconds; then what attention does, which only the chain of both is shorter by."""
    none, some, much = prices(0), prices(AHEAD), prices(100 * AHEAD)
    unit = ffn()
    read_s = 12 * AHEAD / 76e9
    assert none.ahead_s(unit) == 0 and none.computed(unit).alongside == 0
    assert some.ahead_s(unit) == pytest.approx(read_s) and read_s > RATES.hop_s
    gap_s = RATES.hop_s + some.between_s
    for each, ahead_s in ((some, min(read_s, gap_s)), (much, gap_s)):
        price = each.computed(unit)
        assert price.of(Resource.cpu) == pytest.approx(none.computed(unit).of(Resource.cpu) - RATES.hop_s)
        assert price.alongside == pytest.approx(ahead_s - RATES.hop_s)
    assert much.ahead_s(unit) == pytest.approx(none.alone_s(unit) / 2), "half of a unit at most"


def test_nothing_is_counted_on_where_it_does_not_help() -> None:
    """Where the interpreter hands over, where arithmetic binds, where rows do not lie side by side, and of the LM head's blocks."""
    rates = replace(RATES, ahead_bytes=AHEAD, products={**RATES.products, **{form: Curve(((1, 60.0),)) for form in ("INT4-128", "FP8")}})
    each = replace(prices(AHEAD), rates=rates)
    quick = replace(each, rates=replace(rates, products={**rates.products, "GPTQ4-128": Curve(((1, 76.0),)), "FP8": Curve(((1, 75.0),))}))
    assert each.ahead_s(ffn()) > 0 and quick.ahead_s(ffn("FP8")) > 0
    assert not any(one.ahead_s(ffn(form)) for one, form in ((each, "INT4-128"), (each, "FP8"), (quick, "GPTQ4-128")))
    assert replace(each, launched=True).ahead_s(ffn()) == replace(each, turns=2).ahead_s(ffn()) == 0
    assert each.ahead_s(replace(ffn(), kind=UnitKind.head)) == 0


@pytest.mark.parametrize("units", [None, 4, 8, 12])
def test_a_plan_that_reads_ahead_is_predicted_and_simulated_alike(units: int | None) -> None:
    steps_s = []
    for ahead_bytes in (0, AHEAD):
        h = beside(replace(RATES, ahead_bytes=ahead_bytes, hop_s=5e-5))
        asked = work(new_tokens=32)
        made = solve(h, M, asked, force=Force(host_ffn=units))
        plan = Plan(h, M, asked, made, predict(h, M, asked, made))
        steps_s.append(fmean(Simulation(plan).run().record.step_ns) / 1e9)
        assert plan.prediction.decode_s_per_token == pytest.approx(steps_s[-1], rel=0.07)
    assert steps_s[1] <= steps_s[0] * 1.001
    assert units != 12 or steps_s[1] < 0.99 * steps_s[0], "the CPU binds"


def test_threads_read_until_they_are_asked() -> None:
    """100 and 80 ns of work, 10 of them on the way, 30 of which may be read before."""
    lanes = Lanes({}, {})
    lane = HostLane({A: OnHost(100, 10, 30), B: OnHost(80, 10, 30)}, lanes)

    def passed(ns: int) -> None:
        until = lanes.now + ns
        while lanes.now < until and lanes.step():
            pass

    def took(unit: Unit) -> int:
        begun, wait = lanes.now, lane.ask(unit, 0)
        while not wait.ready():
            assert lanes.step()
        return lanes.now - begun

    lane.begin_step()
    passed(30)
    assert took(A) == 70, "all of it is read"
    assert took(B) == 70, "asked at once: what is read on its way"
    assert not lanes.of[CPU].moving, "nothing comes behind the last"
    lane.begin_step()
    assert (took(A), took(B)) == (90, 70)


def test_what_is_read_ahead_holds_up_the_link_as_products_do() -> None:
    """Beside each other copies go at half their speed: 30 ns of reading make 15 of copying."""
    lanes = Lanes({}, {CPU: 1.0, H2D: 0.5})
    lane = HostLane({A: OnHost(100, 10, 30)}, lanes)
    ended: list[int] = []
    lanes.add(H2D, Work(("copy",), "copy", 0, lambda: ended.append(lanes.now)), 40)
    lane.begin_step()
    while lanes.step():
        pass
    assert ended == [30 + 25]
