"""Recorded steps follow the schedule that their seconds speak for, and say so once."""

from __future__ import annotations

from typing import cast

import torch

from penstock.planner.contract.policy.schedule_choice import SEEN, Schedule, ScheduleChoice
from penstock.runtime.model.rows import Row, RowKind, Step
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
