"""How many units the CPU computes beside a card, by what steps take: rates that were probed are off by some percent minutes later.

A state machine without clocks, around the one that leaves the plan's schedule when the CPU is gone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.planner.contract.policy.schedule_choice import AGAIN, LATEST, Schedule, ScheduleChoice

GAIN = 0.015
"""What a schedule must gain to be stayed with: a share of a step."""
BLOCK = 9
"""Steps that are compared with as many by another schedule, by their lower quartile: three to five in a row are slow where neighbours of a
virtual machine take the memory now and then."""
TWICE = 2
"""Trials one behind the other that must gain, each over the steps right before it: a machine that drifts gives one of them by chance."""


@dataclass
class NearChoice:
    """``choice`` has the plan's schedule first. While steps follow that, one of ``ladder`` stands in for it, which has the plan's among
    others with more and fewer units on the CPU, in their order. The next one is tried, on either side in turn, and followed where it took
    less, twice. Trials in vain on both sides are made ever less often."""

    choice: ScheduleChoice
    ladder: Sequence[Schedule]
    steps: Counter[str] = field(default_factory=Counter)
    """How many steps followed each."""
    moves: int = 0
    """How often steps moved from one to another."""

    def __post_init__(self) -> None:
        self._own = self.choice.schedules[0]
        self._home = self._tried = self.ladder.index(self._own)
        self._side, self._won, self._vain = 1, 0, 0
        self._last: deque[float] = deque(maxlen=BLOCK)
        self._moved_now = False
        self._wait, self._since, self._home_s = AGAIN, 0, 0.0

    @property
    def current(self) -> Schedule:
        """That the next step is to follow."""
        return self.ladder[self._tried] if self.choice.current is self._own else self.choice.current

    def took(self, seconds: float) -> str | None:
        """A step by :attr:`current` took so long -> what the user reads of ``choice``. Not told of what waited for anything but itself."""
        self.steps[self.current.name] += 1
        if self._moved_now:  # the copies that it found on their way were the other schedule's
            self._moved_now = False
            return None
        self._last.append(seconds)
        if self._tried != self._home:
            self._judge()
            return None
        before = self.choice.moves
        said = self.choice.took(seconds)
        if self.choice.moves != before:
            self.moves += 1
            self._last.clear()
        elif self.choice.current is self._own:
            self._since += 1
            self._try()
        return said

    def facts(self) -> Mapping[str, object]:
        """For the report."""
        return {"steps": dict(self.steps), "moves": self.moves, "now": self.current.name}

    def _try(self) -> None:
        if self._since < self._wait or len(self._last) < BLOCK:
            return
        if not self._there:
            self._turn()
        if self._there:
            self._home_s = _quick(self._last)
            self._move(self._home + self._side)

    @property
    def _there(self) -> bool:
        """Whether there is another schedule on that side."""
        return 0 <= self._home + self._side < len(self.ladder)

    def _judge(self) -> None:
        """The last steps tried another schedule."""
        if len(self._last) < BLOCK:
            return
        gains = _quick(self._last) < (1 - GAIN) * self._home_s
        self._since, self._wait, self._won = 0, BLOCK, self._won + gains
        if self._won == TWICE:
            self._home, self._won, self._vain = self._tried, 0, 0
            return
        self._move(self._home)
        if not gains:
            self._won = 0
            self._turn()

    def _turn(self) -> None:
        """Nothing is gained on this side: the other one is looked at next, and behind both later."""
        self._side, self._vain = -self._side, self._vain + 1
        self._wait = BLOCK if self._vain % 2 else min(LATEST, AGAIN * 2 ** min(self._vain // 2, 16))

    def _move(self, to: int) -> None:
        self._tried, self._moved_now = to, True
        self._last.clear()
        self.moves += 1


def _quick(seconds: Sequence[float]) -> float:
    """The lower quartile."""
    return sorted(seconds)[len(seconds) // 4]


def choice_of(schedules: Sequence[Schedule], near: Sequence[Schedule]) -> ScheduleChoice | NearChoice:
    """Of ``schedules``, the plan's first, and those ``near`` that one."""
    choice = ScheduleChoice([one for one in schedules if one not in near])
    if not near:
        return choice
    return NearChoice(choice, sorted((schedules[0], *near), key=lambda one: one.host_ffn))
