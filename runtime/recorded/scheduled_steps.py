"""Recorded steps by the best of a plan's schedules for what steps take: another process may have the cores that the plan counts on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from penstock.planner.contract.policy.near_choice import NearChoice
from penstock.planner.contract.policy.schedule_choice import ScheduleChoice
from penstock.runtime.model.rows import Step
from penstock.runtime.recorded.shaped_steps import ShapedSteps


class ScheduledSteps:
    """``recorded`` has the steps of each schedule by its name, in an order that all ranks have. ``choice`` judges them by what steps take;
    None where rank 0 judges, whose steps say which one they follow. ``tell`` gets the line for the user when steps move.

    To move takes one fill of the ring's slots.
    """

    def __init__(self, recorded: Mapping[str, ShapedSteps], choice: ScheduleChoice | NearChoice | None, tell: Callable[[str], None]):
        self._recorded, self._choice, self._tell = recorded, choice, tell
        self._names = list(recorded)
        self._now = recorded[self._names[0] if choice is None else choice.current.name]

    @property
    def refused(self) -> str | None:
        """Why steps are launched one kernel after the other; None where they are not."""
        return self._now.refused

    def serves(self, step: Step) -> bool:
        """Whether :meth:`run` can compute ``step``."""
        return self._now.serves(step)

    def schedule(self) -> int:
        """Number of the schedule that the next step is to follow. Books the last one."""
        self.settle()
        return 0 if self._choice is None else self._names.index(self._choice.current.name)

    def run(self, step: Step) -> torch.Tensor:
        """Compute ``step`` -> logits [rows, vocab] on the device."""
        number = self.schedule()
        wanted = self._recorded[self._names[number if step.schedule is None else step.schedule]]
        if wanted is not self._now and wanted.serves(step):
            self._now.make_way()
            self._now = wanted
        return self._now.run(step)

    def make_way(self) -> None:
        """A pass comes that is launched kernel by kernel."""
        self.settle()
        self._now.make_way()

    def settle(self) -> None:
        """Book the last step, and judge the schedule by it."""
        seconds = self._now.settle()
        said = None if seconds is None or self._choice is None else self._choice.took(seconds)
        if said is not None:
            self._tell(said)

    def facts(self) -> dict[str, object]:
        """For the report: rows of a recorded step, or why there is none, how many were launched, and by which schedule."""
        steps = sum(one.steps for one in self._recorded.values())
        schedules = {} if self._choice is None or len(self._recorded) < 2 else {"schedules": dict(self._choice.facts())}
        return self._now.facts() | {"steps": steps} | schedules
