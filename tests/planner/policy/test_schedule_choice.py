"""Which of a plan's schedules steps follow when the machine changes under them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.schedules import alone, schedules_of
from penstock.planner.contract.policy.schedule_choice import AGAIN, LATEST, SEEN, TRIED, Schedule, ScheduleChoice
from penstock.planner.solver.program import solve
from tests.planner.small import work
from tests.planner.test_host_units import M, beside

HYBRID, ALONE = Schedule("the plan's", 0.08), Schedule("streaming alone", 0.20)


def play(choice: ScheduleChoice, steps: int, seconds: Callable[[Schedule, int], float]) -> list[tuple[Schedule, str | None]]:
    """The schedule that each step followed, and what was said behind it."""
    told = []
    for number in range(steps):
        followed = choice.current
        told.append((followed, choice.took(seconds(followed, number))))
    return told


def as_planned(schedule: Schedule, _: int) -> float:
    return schedule.predicted_s


def crowded(schedule: Schedule, _: int) -> float:
    """Another process has the CPU's cores."""
    return 0.5 if schedule is HYBRID else ALONE.predicted_s


def test_steps_as_planned_follow_the_plan_and_nothing_is_said() -> None:
    choice = ScheduleChoice((HYBRID, ALONE))
    assert {(HYBRID, None)} == set(play(choice, 500, as_planned)) and choice.moves == 0
    assert choice.facts() == {"steps": {"the plan's": 500}, "moves": 0, "now": "the plan's"}


def test_cores_that_are_taken_move_steps_to_streaming_after_a_few_and_it_is_said_once() -> None:
    choice = ScheduleChoice((HYBRID, ALONE))
    play(choice, 20, as_planned)
    told = play(choice, 40, crowded)
    first = next(number for number, (schedule, _) in enumerate(told) if schedule is ALONE)
    assert first == SEEN // 2 + 1, "as soon as most of the steps that are looked at were slow"
    said = [text for _, text in told if text]
    assert len(said) == 1 and "500 ms" in said[0] and "80" in said[0] and "streaming alone" in said[0]


def test_two_slow_steps_move_nothing() -> None:
    choice = ScheduleChoice((HYBRID, ALONE))
    play(choice, 10, as_planned)
    assert not any(text for _, text in play(choice, 2, crowded))
    play(choice, 10, as_planned)
    assert choice.moves == 0


def test_cores_that_are_given_back_are_used_again_and_that_is_said_once() -> None:
    choice = ScheduleChoice((HYBRID, ALONE))
    play(choice, 20, as_planned)
    play(choice, 20, crowded)
    told = play(choice, AGAIN + 20, as_planned)
    assert told[-1][0] is HYBRID
    assert [text for _, text in told if text] == ["steps follow the plan's schedule again, 80 ms each: the CPU has its cores back"]
    again = play(choice, 20, crowded) + play(choice, AGAIN + 20, as_planned)
    assert not any(text for _, text in again) and choice.current is HYBRID


def test_a_trial_in_vain_is_made_ever_less_often() -> None:
    """Of steps for as long as the cores are gone, few are lost to looking."""
    choice = ScheduleChoice((HYBRID, ALONE))
    play(choice, SEEN + 2, crowded)
    lost = sum(schedule is HYBRID for schedule, _ in play(choice, 8 * LATEST, crowded))
    assert lost <= (TRIED + 1) * 15


@given(st.integers(SEEN, 2 * LATEST))
def test_cores_are_used_again_within_as_many_steps_as_they_were_gone(gone: int) -> None:
    choice = ScheduleChoice((HYBRID, ALONE))
    play(choice, 20, as_planned)
    play(choice, gone, crowded)
    told = play(choice, min(gone + AGAIN, LATEST) + 2 * SEEN, as_planned)
    assert told[-1][0] is HYBRID


def test_of_two_slow_schedules_the_less_slow_one_is_followed() -> None:
    """The link is slow too: streaming alone is tried, and left again."""
    choice = ScheduleChoice((HYBRID, ALONE))
    told = play(choice, 200, lambda schedule, _: 0.3 if schedule is HYBRID else 0.6)
    assert {schedule for schedule, _ in told} == {HYBRID, ALONE} and {schedule for schedule, _ in told[-100:]} == {HYBRID}


def test_a_plan_of_one_schedule_follows_it_whatever_it_takes() -> None:
    choice = ScheduleChoice((ALONE,))
    assert not any(text for _, text in play(choice, 200, lambda *_: 9.0)) and choice.moves == 0


@given(
    predicted=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=4),
    ratios=st.lists(st.floats(0.5, 10.0), min_size=4, max_size=4),
)
def test_on_a_machine_that_stays_as_it_is_the_last_steps_follow_nearly_the_best(predicted: list[float], ratios: list[float]) -> None:
    """Whatever was predicted, except where a schedule that was promised to be no better than the one followed turns out better."""
    schedules = [Schedule(f"{k}", seconds) for k, seconds in enumerate(predicted)]
    took = dict(zip(schedules, (s * r for s, r in zip(predicted, ratios, strict=False)), strict=True))
    choice = ScheduleChoice(schedules)
    last = [schedule for schedule, _ in play(choice, 40 * SEEN, lambda schedule, _: took[schedule])][-1]
    known = [s for s in schedules if choice.steps[s.name]]
    assert took[last] <= 1.06 * min(took[s] for s in known) or last is schedules[0]
    untried = [s for s in schedules if s not in known]
    assert all(s.predicted_s >= 0.94 * took[last] for s in untried)


def test_a_plan_has_its_own_schedule_and_where_the_cpu_computes_streaming_alone() -> None:
    hardware = beside()
    made = solve(hardware, M, work())
    plan = Plan(hardware, M, work(), made, predict(hardware, M, work(), made))
    own, other = schedules_of(plan)
    assert plan.placement.host_units and own.predicted_s == plan.prediction.decode_s_per_token
    assert other.predicted_s == alone(plan).prediction.decode_s_per_token > own.predicted_s
    assert alone(plan).placement.units == plan.placement.units and not alone(plan).placement.host_units
    assert schedules_of(alone(plan)) == (Schedule(own.name, other.predicted_s),)
