"""Of plans in which the CPU computes beside what streams, the one that takes least when it is simulated: the program's law knows how much
each resource carries, not that a ring of a few slots keeps a link waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_seconds
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.ranks.ranks_act import RanksSimulation
from penstock.planner.solver.program import solve
from penstock.planner.solver.terms.problem import Question

NEARBY = (-3, -2, -1, 1)
"""Units more than the program's that the CPU is given instead, of each rank. Blocks of the LM head and the card's units follow."""
STEPS = 5
"""Simulated of each plan; the last of them counts. A ring goes round in two or three."""
GAIN = 0.01
"""What another plan must gain: a share of the seconds that are minimized."""


@dataclass(frozen=True)
class Acted:
    """A plan that takes less than the program's own when both are simulated."""

    plan: Plan
    step_s: float
    """Of a step."""
    instead_s: float
    """Of a step of the program's own plan."""
    own_units: int
    """FFN units of the CPU in that, of a rank."""

    @property
    def told(self) -> str:
        """Why it was taken, for people."""
        units, of_each = self.plan.decisions.weights.host.ffn, " of each rank" * (self.plan.ranks.count > 1)
        return (
            f"{units} FFN units{of_each} on the CPU, where the program's law has {self.own_units}: simulated, a step takes"
            f" {show_seconds(self.step_s)} in place of {show_seconds(self.instead_s)}"
        )


def acted_choice(question: Question, best: Decisions) -> Acted | None:
    """What to decide in place of ``best``, which the program found for the one rank of ``question``; None where that is right, and where
    there are several ranks, which are simulated together. Costs as :func:`acted_nearby`: a third of a second for a dense model of 8B."""
    q = question.of_rank(0)
    if q.model.dealt is not None:
        return None

    def planned(decisions: Decisions) -> Plan:
        return Plan(q.hardware, q.model, q.workload, decisions, predict(q.hardware, q.model, q.workload, decisions))

    return acted_nearby(planned(best), q.force, lambda units: planned(solve(q.hardware, q.model, q.workload, q.force.but(host_ffn=units))))


def acted_nearby(own: Plan, force: Force, nearby: Callable[[int], Plan]) -> Acted | None:
    """The plan that takes least of those with so many FFN units on the CPU as ``nearby`` gives them, where that gains over ``own``, the
    program's answer to ``force``. ``nearby`` raises UserError where there is no plan. Costs five of its solves and six short simulations;
    nothing where the CPU computes no FFN beside copies, or as many as asked, or not as many for each rank."""
    units, *others = {one.weights.host.ffn for one in own.ranks.decided(own.decisions)}
    asked = force.host_ffn is not None or own.workload.is_served or own.model.experts is not None
    if asked or others or not units or own.workload.new_tokens < 2 or not own.of_rank(0).placement.h2d_bytes_per_pass:
        return None
    own_s, instead_s = _seconds(own)
    seconds, step_s, plan = min(
        ((*_seconds(other), other) for other in _nearby(units, nearby)), key=lambda one: one[0], default=(own_s, 0.0, own)
    )
    return Acted(plan, step_s, instead_s, units) if seconds < (1 - GAIN) * own_s else None


def _nearby(units: int, nearby: Callable[[int], Plan]) -> Iterator[Plan]:
    for other in sorted({0, *(max(0, units + more) for more in NEARBY)} - {units}):  # without the CPU nothing waits for it
        try:
            yield nearby(other)
        except UserError:  # no plan has so many there
            continue


def _seconds(plan: Plan) -> tuple[float, float]:
    """What is minimized, by a step that takes as long as the simulated one or as the predicted one, whichever is longer: neither knows all
    that it waits for. And the simulated step."""
    said = plan.prediction
    work = replace(plan.workload, new_tokens=min(plan.workload.new_tokens, STEPS + 1), requests=plan.decisions.batch)
    short = replace(plan, workload=work)
    acted = RanksSimulation(short, Options()).run()[0] if plan.ranks.count > 1 else Simulation(short, Options()).run()
    step_s = acted.record.step_ns[-1] / 1e9
    steps = (said.total_s - said.prefill_s) / said.decode_s_per_token
    return said.total_s + steps * max(0.0, step_s - said.decode_s_per_token), step_s
