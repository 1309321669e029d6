"""Which of a plan's schedules a decode step follows, by what steps take: another process may have taken the cores that the plan counts on.

A state machine without clocks: whoever runs steps tells how long each took, and is told when to follow another schedule.

    a schedule's estimate = its predicted seconds * what its last steps took / what was predicted of them

One that was never followed is taken to be as predicted. So a schedule that promises more is tried once, and judged by its own steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from penstock.planner.common.measures import show_seconds

SEEN = 5
"""Steps whose median judges a schedule that is followed; the last of them are the median's, so two slow ones move nothing."""
TRIED = 2
"""Steps for which a schedule is tried again that was left."""
MARGIN = 0.05
"""What another schedule must gain: a share of a step. Less would follow the noise of steps."""
AGAIN, LATEST = 16, 1024
"""Steps until the plan's own schedule is tried again, twice as many after each trial in vain, up to the latest. So what was taken for some
steps and given back is used again within about as many."""


@dataclass(frozen=True)
class Schedule:
    """One way to take the same step."""

    name: str
    """As it is said: `the plan's`, `streaming alone`."""
    predicted_s: float
    host_ffn: int = 0
    """FFN units that the CPU computes."""


@dataclass
class ScheduleChoice:
    """``schedules`` of one plan, its own first. The next step is to follow :attr:`current`."""

    schedules: Sequence[Schedule]
    steps: Counter[str] = field(default_factory=Counter)
    """How many steps followed each."""
    moves: int = 0
    """How often steps moved from one to another."""

    def __post_init__(self) -> None:
        self._ratios: dict[Schedule, float] = {}
        self._last: deque[float] = deque(maxlen=SEEN)
        self._moved_now = self._on_trial = False
        self._wait, self._since = AGAIN, 0
        self._said: set[bool] = set()
        self.current = self.schedules[0]

    def estimate_s(self, schedule: Schedule) -> float:
        """Seconds of a step by ``schedule``, as far as is known."""
        return schedule.predicted_s * self._ratios.get(schedule, 1.0)

    def took(self, seconds: float) -> str | None:
        """A step by :attr:`current` took so long -> what the user reads, once in a run for leaving the plan's schedule and once for coming
        back. Do not tell of steps that waited for anything but themselves, such as one behind a prompt."""
        self.steps[self.current.name] += 1
        if self._moved_now:  # the copies that it found on their way were the other schedule's
            self._moved_now = False
            return None
        self._last.append(seconds)
        if len(self._last) < (TRIED if self._on_trial else SEEN):
            return None
        self._ratios[self.current] = median(self._last) / self.current.predicted_s
        best = min(self.schedules, key=self.estimate_s)
        if self.estimate_s(best) < (1 - MARGIN) * self.estimate_s(self.current):
            return self._move(best, trial=False)
        if self.current is not self.schedules[0]:
            self._since += 1
            if self._since >= self._wait:
                return self._move(self.schedules[0], trial=True)
        elif self._on_trial:  # it is the best again
            self._on_trial, self._wait = False, AGAIN
            return self._say(back=True)
        return None

    def facts(self) -> Mapping[str, object]:
        """For the report."""
        return {"steps": dict(self.steps), "moves": self.moves, "now": self.current.name}

    def _move(self, to: Schedule, trial: bool) -> str | None:
        came, was_trial = self.current, self._on_trial
        own = self.schedules[0]
        if was_trial and came is own:
            self._wait = min(LATEST, 2 * self._wait)
        self.current, self._on_trial, self._moved_now, self._since = to, trial, True, 0
        self._last.clear()
        self.moves += 1
        return self._say(back=False, left=came) if came is own and not was_trial else None

    def _say(self, back: bool, left: Schedule | None = None) -> str | None:
        if back in self._said:
            return None
        self._said.add(back)
        if back:
            return f"steps follow the plan's schedule again, {show_seconds(self.estimate_s(self.current))} each: the CPU has its cores back"
        assert left is not None
        return (
            f"a step took {show_seconds(self.estimate_s(left))} where {show_seconds(left.predicted_s)} was planned: the CPU gives less than"
            f" the plan counts on, as when another process takes its cores; {self.current.name} from now on,"
            f" {show_seconds(self.estimate_s(self.current))} a step by the plan"
        )
