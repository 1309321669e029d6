"""A plan of several ranks: how many there are to be, and what each of them decides."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_seconds
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.speculating import Speculate
from penstock.planner.contract.given.unit_spec import UnitSpec
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.plan_ranks import Ranks, check_ranks
from penstock.planner.contract.plan.rank_predictions import predict_ranks
from penstock.planner.solver.program import optimum
from penstock.planner.solver.simple_choice import choose, doubt
from penstock.planner.solver.terms.problem import Question

_ALONE = ("host_ffn", "host_rows", "expert_host", "speculate_tokens")
"""Decisions of one rank alone yet."""


def ranks_of(cfg: SolveConfig, question: Question) -> tuple[int, tuple[str, ...]]:
    """The ranks that ``cfg`` asks for. Where it says nothing: one for each card of every host. Of one host it is one alone where all cannot
    be or are no faster, as a note then says. UserError where they are asked for and cannot be. Costs two solves where there are several
    cards to choose from."""
    hosts = question.hardware.hosts
    count = (question.hardware.cards or 1) * hosts if cfg.ranks is None else cfg.ranks
    try:
        _check(cfg, question, count)
    except UserError as error:
        if cfg.ranks is not None or hosts > 1:
            raise
        why = str(error).partition("; ")[0].removeprefix(f"ranks={count}: ")
        return 1, (f"one of {count} GPUs is used: {why}",)
    if cfg.ranks is not None or count == 1 or hosts > 1:
        return count, ()
    if question.workload.is_served:
        return 1, (f"one of {count} GPUs is used: a server takes more where they are asked for (ranks={count})",)
    one, all_of_them = optimum(question), optimum(replace(question, ranks=count))
    if one is None or all_of_them is None or all_of_them.total_s < one.total_s:
        return count, ()
    seconds = f"{show_seconds(all_of_them.token_s)} a token, and {show_seconds(one.token_s)} with one"
    return 1, (f"one of {count} GPUs is used: layers of several ranks follow each other, so that all take {seconds} (ranks={count})",)


def _check(cfg: SolveConfig, question: Question, count: int) -> None:
    q = question
    check_ranks(q.hardware, q.model, q.workload, count)
    if count == 1:
        return
    if cfg.speculate is not Speculate.none:
        raise UserError(f"ranks={count}: speculate={cfg.speculate} works on one rank alone yet; set ranks=1, or speculate=none")
    for name in _ALONE:
        if q.force.given.get(name):
            raise UserError(f"ranks={count}: {q.force.key(name)} is of one rank alone yet; set ranks=1, or leave it out")


def answer_dealt(question: Question, notes: tuple[str, ...] = ()) -> Plan:
    """The plan of all ranks. The first one, which has most layers, decides batch, passes and pages for all; ranks with the same units
    decide the same. Costs a solve for each kind of rank, four at most. Raises UserError; ``Infeasible`` when one finds no plan."""
    q, found = question, dict[tuple[UnitSpec, ...], Decisions]()
    decided: list[Decisions] = []
    for rank in range(q.ranks):
        asked = q.of_rank(rank)
        if asked.model.units not in found:
            if decided:
                first = decided[0]
                shared = {name: getattr(first, name) for name in ("prefill_chunk_tokens", "prefill_part_tokens")}
                force = q.force.without("embedding").but(page_tokens=first.kv.page_tokens, **shared)
                asked = replace(asked, force=force, workload=replace(q.workload, batch=first.batch))
            choice = choose(asked)
            found[asked.model.units] = choice.decisions
            if not decided and choice.left is not None:
                notes = (*notes, doubt(choice.left))
        decided.append(found[asked.model.units])
    predicted = predict_ranks(q.hardware, q.model, q.workload, decided, q.dealing)
    return Plan(q.hardware, q.model, q.workload, decided[0], predicted, notes, Ranks.of(decided, q.dealing))
