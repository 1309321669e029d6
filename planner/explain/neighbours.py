"""What each decision of a plan is worth: the best plan with that one decision forced to the values next to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.allowed import next_to
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.declared import FORCED
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.workload import Objective
from penstock.planner.contract.rules.setting import Setting
from penstock.planner.explain.side_by_side import side_by_side
from penstock.planner.solver.program import Optimum, optimum
from penstock.planner.solver.terms.menu import batch_menu, menus_on_offer
from penstock.planner.solver.terms.problem import Question

BATCH = "workload.batch"


@dataclass(frozen=True)
class Neighbour:
    """The plan with ``key`` at ``value``, everything else left to the program. ``decided`` is what the plan says, ``base`` what it takes,
    or the fastest of all; ``found`` is found in the same way."""

    key: str
    """What a user sets to fix it."""
    decided: Any
    value: Any
    base: Optimum
    found: Optimum | None
    why: str = ""
    """Why there is no plan."""

    @property
    def lost_s(self) -> float | None:
        """Seconds per token beyond those of ``base``."""
        return None if self.found is None else self.found.token_s - self.base.token_s

    @property
    def loss(self) -> float | None:
        """Share of what is minimised beyond that of ``base``."""
        return None if self.found is None else self.found.total_s / self.base.total_s - 1

    @property
    def is_decided(self) -> bool:
        """Whether it is the plan's own value."""
        return self.value == self.decided


def candidates(question: Question, decisions: Decisions, own: bool = False) -> list[tuple[str, Any, Any]]:
    """(name among ``Force``'s or ``BATCH``, decided, other value) for each decision that the program weighs; with ``own`` the decided
    values, too. What the question forces is no decision."""
    found = []
    for name, decided, values in _menus(question, decisions):
        if name not in question.force.given:
            found += [(name, decided, value) for value in ([decided] if own else []) + list(values)]
    return found


def neighbours(
    question: Question,
    base: Optimum,
    asked: Iterable[tuple[str, Any, Any]],
    find: Callable[[Question], Optimum | None] = optimum,
    advance: Callable[[], None] = lambda: None,
) -> tuple[Neighbour, ...]:
    """Each of ``asked`` found by ``find``, to be compared with ``base``, which it found where nothing was forced. ``advance`` is called
    after each."""

    def beside(given: tuple[str, Any, Any]) -> Neighbour:
        name, decided, value = given
        why, best = "no plan fits", None
        try:
            best = find(_forced(question, base.batch, name, value))
        except UserError as error:
            why = str(error)
        return Neighbour(BATCH if name == BATCH else Force.key(name), decided, value, base, best, "" if best else why)

    return tuple(side_by_side(beside, list(asked), advance))


def _forced(question: Question, batch: int, name: str, value: Any) -> Question:
    """At the batch of ``base``, so that a decision is compared and not another batch."""
    if name == BATCH:
        return replace(question, workload=replace(question.workload, batch=value))
    return replace(question, workload=replace(question.workload, batch=batch), force=question.force.but(**{name: value}))


def _menus(question: Question, d: Decisions) -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """Each decision: its name, its value and the values next to it that the program could have taken. Beyond its menus the prediction is
    not to be trusted: what small passes, small blocks or few reads cost a run, it does not see."""
    first = question.of_rank(0)
    model, hardware, work = first.model, first.hardware, first.workload
    setting, menus = Setting(hardware, model, d), menus_on_offer(hardware, work)
    for one in FORCED.values():
        decided = one.of(d)
        if not one.how.weighed or decided is None or (one.how.card and hardware.gpu is None):
            continue
        at = min(decided, work.prompt_tokens) if one.name == "prefill_chunk_tokens" else decided
        yield one.name, decided, next_to(menus[one.name], at) if one.name in menus else setting.allowed(one).beside(decided)
    if work.objective is Objective.throughput:
        yield BATCH, d.batch, next_to(batch_menu(replace(work, batch=0)), d.batch)
