"""Which of the schedules near a plan's steps follow, by what they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import KvPages
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.decided.speculating import Drafter, Speculation
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.schedules import ALONE, OWN, beside, near_counts, schedules_of
from penstock.planner.contract.policy.near_choice import BLOCK, NearChoice, choice_of
from penstock.planner.contract.policy.schedule_choice import AGAIN, LATEST, SEEN, Schedule, ScheduleChoice
from penstock.planner.solver.program import solve
from tests.planner.small import work
from tests.planner.test_host_units import M
from tests.planner.test_host_units import beside as machine_beside

PLANNED = Schedule(OWN, 0.08, 10)
NEAR = [Schedule(f"{count} ffn on the CPU", 0.082, count) for count in (8, 9, 11, 12)]
STREAMING = Schedule(ALONE, 0.2)


def choice(near: int = 1) -> NearChoice:
    made = choice_of((PLANNED, *NEAR[2 - near : 2 + near], STREAMING), NEAR[2 - near : 2 + near])
    assert isinstance(made, NearChoice)
    return made


def play(made: NearChoice | ScheduleChoice, steps: int, seconds: Mapping[int, float], noise: float = 0.0, seed: int = 0) -> list[int]:
    """Units on the CPU of each step; steps differ by ``noise``, a share, by chance."""
    draw, followed = Random(seed), []
    for _ in range(steps):
        followed.append(made.current.host_ffn)
        made.took(seconds[made.current.host_ffn] * (1 + noise * draw.gauss(0, 1)))
    return followed


def test_a_unit_more_or_fewer_is_followed_where_it_takes_less() -> None:
    for best in (9, 11):
        made = choice()
        followed = play(made, 200, {9: 0.09, 10: 0.08, 11: 0.09, 0: 0.2} | {best: 0.075})
        assert followed[:AGAIN] == [10] * AGAIN, "first the plan's own"
        assert followed[-60:].count(best) > 40 and f"{best} ffn on the CPU" in made.facts()["steps"]
        assert sum(made.steps.values()) == 200 and followed.count(best) > 100


def test_where_the_plan_is_the_best_few_steps_are_lost_to_looking() -> None:
    made = choice()
    followed = play(made, 4 * LATEST, {9: 0.085, 10: 0.08, 11: 0.085, 0: 0.2})
    assert followed[-1] == 10
    assert 0 < sum(units != 10 for units in followed) < 0.05 * len(followed)
    assert {9, 11} <= set(followed[: 4 * AGAIN]), "both sides, soon"


def test_steps_go_on_to_a_schedule_two_units_away() -> None:
    made = choice(near=2)
    assert play(made, 200, {8: 0.070, 9: 0.075, 10: 0.08, 11: 0.085, 12: 0.09, 0: 0.2})[-1] == 8


@given(st.integers(0, 1000))
def test_noise_alone_moves_to_nothing_that_is_slower_by_more_than_it(seed: int) -> None:
    made = choice()
    followed = play(made, 400, {9: 0.084, 10: 0.08, 11: 0.084, 0: 0.2}, noise=0.01, seed=seed)
    assert followed[-100:].count(10) > 60


def test_a_cpu_that_is_gone_moves_steps_to_streaming_whichever_schedule_they_follow() -> None:
    made = choice()
    play(made, 150, {9: 0.09, 10: 0.08, 11: 0.075, 0: 0.2})
    assert made.current.host_ffn == 11
    gone = play(made, 60, {9: 0.5, 10: 0.5, 11: 0.5, 0: 0.2})
    assert gone[-1] == 0 and gone.index(0) <= 2 * BLOCK + SEEN
    assert play(made, 200, {9: 0.09, 10: 0.08, 11: 0.075, 0: 0.2})[-1] == 11, "and back when it is there again"


def planned(**forced: int) -> Plan:
    hardware = machine_beside()
    made = solve(hardware, M, work(), Force(**forced))
    return Plan(hardware, M, work(), made, predict(hardware, M, work(), made))


def test_a_plan_has_schedules_near_it_where_a_user_asks_for_them() -> None:
    plan = planned(host_near=1)
    ffn = plan.decisions.weights.host.ffn
    assert near_counts(planned()) == () and near_counts(plan) == (ffn - 1, ffn + 1)
    own, fewer, more, alone = schedules_of(plan)
    assert [own.host_ffn, fewer.host_ffn, more.host_ffn, alone.host_ffn] == [ffn, ffn - 1, ffn + 1, 0]
    assert own.name == OWN and alone.name == ALONE
    for one in (fewer, more):
        other = beside(plan, one.host_ffn)
        assert one.predicted_s == other.prediction.decode_s_per_token
        assert other.placement.units == plan.placement.units and len(other.placement.host_units) == one.host_ffn
    assert min(schedules_of(plan), key=lambda one: one.predicted_s).predicted_s >= 0.995 * own.predicted_s
    with pytest.raises(UserError, match=r"force.host_near=99 .*allowed: 0 to 16, the model's layers"):
        planned(host_near=99)
    assert near_counts(planned(host_ffn=0, host_near=1)) == (), "streaming alone is near nothing"


def test_no_schedule_is_near_one_that_verifies_drafts_or_attends_on_the_cpu() -> None:
    plan = planned(host_near=1)
    made = plan.decisions
    drafted = replace(plan, decisions=replace(made, speculation=Speculation(Drafter.lookup, 4, 0.5)))
    attended = replace(plan, decisions=replace(made, kv=KvPages(16, 0, made.kv.pages, 0, host_layers=2)))
    assert near_counts(drafted) == near_counts(attended) == ()
    least = replace(plan, decisions=replace(made, weights=replace(made.weights, host=replace(made.weights.host, ffn=1))))
    assert near_counts(least) == (2,), "none at all is streaming alone"
    every = place(M, made.weights, True).ffn
    outside = sum(tier.name == "dram" for tier in every)
    most = replace(plan, decisions=replace(made, weights=replace(made.weights, host=replace(made.weights.host, ffn=outside))))
    assert near_counts(most) == (outside - 1,)
