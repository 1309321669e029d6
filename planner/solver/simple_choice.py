"""Whether the fastest plan is worth more than a simple one on every machine that this one may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.planner.contract.bills.cost import objective_s
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.lessons.corrections import slowed
from penstock.planner.contract.lessons.spread import spread
from penstock.planner.solver.acted_choice import Acted, acted_choice
from penstock.planner.solver.program import nearest_first, solve
from penstock.planner.solver.terms.problem import Question

SAME = 0.01
"""Two plans whose seconds differ by no more than this share are equally fast. The program itself gives up half of it for memory. Of the
two, the one with less memory is better, which is certain."""


@dataclass(frozen=True)
class Gain:
    """Share of the fastest plan's seconds that the simple one takes more: by the profile, and at either end of nine in ten."""

    promised: float
    least: float
    most: float

    @property
    def doubtful(self) -> bool:
        """Whether on machines that this one may be the fastest plan is no better, and the two are not as fast on all of these."""
        return self.least <= 0 and max(self.promised, -self.least) > SAME


@dataclass(frozen=True)
class Choice:
    """Decisions that answer a question; ``left`` is what the fastest plan gains over them, where they are simple ones since that is
    doubtful. ``acted``: how they were simulated, where that chose them."""

    decisions: Decisions
    left: Gain | None = None
    acted: Acted | None = None


def choose(question: Question) -> Choice:
    """The fastest decisions, or those nearby that are when they are simulated, or the simple ones where it is not certain that these are
    slower. Costs those of ``solve``, four solves and 30 objectives, and those of ``acted_choice``. Raises
    ``penstock.planner.solver.infeasible.Infeasible`` and UserError as ``solve`` does."""
    q = question.of_rank(0)
    best = solve(q.hardware, q.model, q.workload, q.force)
    if (acted := acted_choice(question, best)) is not None:
        return Choice(acted.plan.decisions, acted=acted)
    simple = nearest_first(q, best)
    if simple is None or simple == best:
        return Choice(best)
    found = gain(q, best, simple)
    return Choice(simple, found) if found.doubtful else Choice(best)


def gain(question: Question, chosen: Decisions, simple: Decisions) -> Gain:
    """The gain of ``chosen`` over ``simple`` in the objective T. Both run on the same machine, so an error in a figure is an error for
    both.

        r       = ln(T(simple) / T(chosen))                   by the profile
        r(f, s) = the same, with the seconds of figure f times s

    The ends of nine in ten are

        least = r - sqrt(sum over f of max(0, r - r(f, 1 + d), r - r(f, 1 / (1 + d)))^2)
        most  = r + sqrt(sum over f of max(0, r(f, 1 + d) - r, r(f, 1 / (1 + d)) - r)^2)

    where d is the spread of f (``lessons.spread``). Figures err independently, so the squares of their effects are summed. All three are
    returned as exp(.) - 1. Costs 30 objectives.
    """
    q = question.of_rank(0)

    def ratio(by: Mapping[Figure, float]) -> float:
        machine = slowed(q.hardware, by)
        mine, its = (objective_s(machine, q.model, q.workload, decisions) for decisions in (chosen, simple))
        return math.log(its / mine)

    promised, down, up = ratio({}), 0.0, 0.0
    for figure in Figure:
        share = 1 + spread(q.hardware, figure)
        ends = ratio({figure: share}) - promised, ratio({figure: 1 / share}) - promised
        down += max(0.0, *(-end for end in ends)) ** 2
        up += max(0.0, *ends) ** 2
    return Gain(*(math.expm1(log) for log in (promised, promised - math.sqrt(down), promised + math.sqrt(up))))


def doubt(left: Gain) -> str:
    """Why the simple plan was taken, for people."""
    what = "the simple plan (each tier filled, nearest first)"
    if left.promised > SAME:
        ends = f"{left.least:+.1%} to {left.most:+.1%}"
        return f"{what}: it is predicted to take {left.promised:.1%} longer than the fastest plan; with the figures' errors {ends}"
    return f"{what}: it is predicted as fast as a plan with less memory; with the figures' errors it may take {-left.least:.1%} less time"
