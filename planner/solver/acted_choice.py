"""Of plans in which the CPU computes beside what streams, the one that takes least when it is simulated: the program's law knows how much
each resource carries, not that a ring of a few slots keeps a link waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_seconds
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.cost import predict
from penstock.planner.simulate.act import Simulation
from penstock.planner.simulate.acted import Options
from penstock.planner.solver.program import solve
from penstock.planner.solver.terms.problem import Question

NEARBY = (-3, -2, -1, 1)
"""Units more than the program's that the CPU is given instead. Blocks of the LM head and the card's units follow."""
STEPS = 5
"""Simulated of each plan; the last of them counts. A ring goes round in two or three."""
GAIN = 0.01
"""What another plan must gain: a share of the seconds that are minimized."""


@dataclass(frozen=True)
class Acted:
    """Decisions that were simulated."""

    decisions: Decisions
    step_s: float
    """Of a step."""
    instead_s: float
    """Of a step of the program's own decisions."""
    own_units: int
    """FFN units of the CPU in those."""

    @property
    def told(self) -> str:
        """Why these were taken, for people."""
        units = self.decisions.weights.host.ffn
        return (
            f"{units} FFN units on the CPU, where the program's law has {self.own_units}: simulated, a step takes"
            f" {show_seconds(self.step_s)} in place of {show_seconds(self.instead_s)}"
        )


def acted_choice(question: Question, best: Decisions) -> Acted | None:
    """What to decide in place of ``best``, which ``question``'s program found; None where that is right. Costs four solves and five short
    simulations, a third of a second for a dense model of 8B; nothing where the CPU computes no FFN beside copies, or as many as asked."""
    q, host = question.of_rank(0), best.weights.host
    asked = q.force.host_ffn is not None or q.workload.is_served or q.model.dealt is not None or q.model.experts is not None
    if asked or not host.ffn or q.workload.new_tokens < 2 or not _plan(question, best).placement.h2d_bytes_per_pass:
        return None
    own_s, instead_s = _seconds(question, best)
    seconds, step_s, decisions = min(
        ((*_seconds(question, other), other) for other in _nearby(question, host.ffn)), key=lambda one: one[0], default=(own_s, 0.0, best)
    )
    return Acted(decisions, step_s, instead_s, host.ffn) if seconds < (1 - GAIN) * own_s else None


def _nearby(question: Question, units: int) -> Iterator[Decisions]:
    q = question.of_rank(0)
    for other in sorted({max(0, units + more) for more in NEARBY} - {units}):
        try:
            yield solve(q.hardware, q.model, q.workload, q.force.but(host_ffn=other))
        except UserError:  # no plan has so many there
            continue


def _plan(question: Question, decisions: Decisions) -> Plan:
    q = question.of_rank(0)
    return Plan(q.hardware, q.model, q.workload, decisions, predict(q.hardware, q.model, q.workload, decisions))


def _seconds(question: Question, decisions: Decisions) -> tuple[float, float]:
    """What is minimized, with the simulated step in place of the predicted one, and that step."""
    plan = _plan(question, decisions)
    said, short = plan.prediction, replace(plan.workload, new_tokens=min(plan.workload.new_tokens, STEPS + 1), requests=decisions.batch)
    step_s = Simulation(replace(plan, workload=short), Options()).run().record.step_ns[-1] / 1e9
    steps = (said.total_s - said.prefill_s) / said.decode_s_per_token
    return said.total_s + steps * (step_s - said.decode_s_per_token), step_s
