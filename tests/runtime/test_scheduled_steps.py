"""Recorded steps follow the schedule that their seconds speak for, and say so once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import cast

import torch

from penstock.planner.contract.policy.schedule_choice import SEEN, Schedule, ScheduleChoice
from penstock.runtime.model.rows import Row, RowKind, Step
from penstock.runtime.ranks.followers import rows_in_words, step_of_words
from penstock.runtime.recorded.scheduled_steps import ScheduledSteps
from penstock.runtime.recorded.shaped_steps import ShapedSteps

STEP = Step((Row(0, (5,), 3, (0,), RowKind.decode),))


class PlayedSteps:
    """Steps that take ``seconds``."""

    refused = None

    def __init__(self, seconds: float, log: list[str], name: str):
        self.seconds, self._log, self._name = seconds, log, name
        self._open, self.steps = False, 0

    def serves(self, step: Step) -> bool:
        return True

    def run(self, step: Step) -> torch.Tensor:
        assert not self._open, "the step before was not booked"
        self._open, self.steps = True, self.steps + 1
        self._log.append(self._name)
        return torch.empty(0)

    def settle(self) -> float | None:
        was, self._open = self._open, False
        return self.seconds if was else None

    def make_way(self) -> None:
        self._log.append(f"{self._name} makes way")

    def facts(self) -> dict[str, object]:
        return {"rows": 1, "refused": None, "steps": self.steps}

    def stop(self) -> None:
        self.settle()


def test_steps_move_when_the_cpu_is_slower_than_planned() -> None:
    log: list[str] = []
    own, alone = PlayedSteps(0.1, log, "own"), PlayedSteps(0.2, log, "alone")
    told: list[str] = []
    choice = ScheduleChoice((Schedule("own", 0.1), Schedule("alone", 0.2)))
    steps = ScheduledSteps({"own": cast(ShapedSteps, own), "alone": cast(ShapedSteps, alone)}, choice, told.append)
    for _ in range(SEEN):
        steps.run(STEP)
    assert set(log) == {"own"} and not told
    own.seconds = 0.5
    for _ in range(2 * SEEN):
        steps.run(STEP)
    assert log[-1] == "alone" and log.count("own makes way") == 1 and len(told) == 1
    made = steps.facts()
    assert made["steps"] == own.steps + alone.steps == 3 * SEEN and cast(dict, made["schedules"])["moves"] == 1


def test_ranks_follow_the_schedule_that_rank_0_tells_with_the_step() -> None:
    """Whatever their own steps took: all follow one, or the others wait for ever."""
    logs: list[list[str]] = [[], [], []]
    told: list[str] = []
    choice = ScheduleChoice((Schedule("own", 0.1), Schedule("alone", 0.2)))
    ranks = [
        ScheduledSteps({name: cast(ShapedSteps, PlayedSteps(0.5 + rank, log, name)) for name in ("own", "alone")}, judge, told.append)
        for rank, (log, judge) in enumerate(zip(logs, (choice, None, None), strict=True))
    ]
    for number in range(3 * SEEN):
        step = replace(STEP, schedule=ranks[0].schedule())
        words = json.loads(json.dumps([rows_in_words(step), step.ends, step.schedule]))
        for rank in ranks:
            rank.run(step if rank is ranks[0] else step_of_words(*words))
        if number == SEEN:
            for rank in ranks:
                rank.make_way()
    assert logs[0] == logs[1] == logs[2] and {"own", "alone"} <= set(logs[0]) and len(told) == 1
    assert [rank.schedule() for rank in ranks[1:]] == [0, 0] and all("schedules" not in rank.facts() for rank in ranks[1:])
