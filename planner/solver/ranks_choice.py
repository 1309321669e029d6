"""A plan of several ranks: how many there are to be, and what each of them decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_seconds
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.recording import never_recorded
from penstock.planner.contract.decided.speculating import Speculate
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.plan_ranks import Ranks, check_ranks
from penstock.planner.contract.plan.rank_predictions import predict_ranks
from penstock.planner.solver.acted_choice import Acted, acted_nearby
from penstock.planner.solver.infeasible import Infeasible
from penstock.planner.solver.layer_counts import slowest, with_counts
from penstock.planner.solver.program import optimum
from penstock.planner.solver.simple_choice import choose, doubt
from penstock.planner.solver.terms.problem import Question


def on_ranks(cfg: SolveConfig, question: Question) -> tuple[Question, tuple[str, ...]]:
    """``question`` of the ranks that ``cfg`` asks for, and what is to be said of them. Where it says nothing: one for each card of every
    host. Of one host it is one alone where all cannot be or are no faster, as a note then says. UserError where they are asked for and
    cannot be. Costs two solves where there are several cards to choose from, and those of ``with_counts``."""
    hosts = question.hardware.hosts
    count = (question.hardware.cards or 1) * hosts if cfg.ranks is None else cfg.ranks
    try:
        _check(cfg, question, count)
    except UserError as error:
        if cfg.ranks is not None or hosts > 1:
            raise
        why = str(error).partition("; ")[0].removeprefix(f"ranks={count}: ")
        return question, (f"one of {count} GPUs is used: {why}",)
    if question.workload.is_served and cfg.ranks is None and count > 1 and hosts == 1:
        return question, (f"one of {count} GPUs is used: a server takes more where they are asked for (ranks={count})",)
    dealt = with_counts(replace(question, ranks=count))
    if cfg.ranks is not None or count == 1 or hosts > 1:
        return dealt, ()
    one, all_of_them = optimum(question), slowest(dealt)
    if one is None or all_of_them is None or all_of_them.total_s < one.total_s:
        return dealt, ()
    seconds = f"{show_seconds(all_of_them.token_s)} a token, and {show_seconds(one.token_s)} with one"
    launched = "; their steps would be recorded if `planner probe` had measured links.word_hop_s" if _lacks_words(dealt) else ""
    return question, (
        f"one of {count} GPUs is used: layers of several ranks follow each other, so that all take {seconds} (ranks={count}){launched}",
    )


def _lacks_words(dealt: Question) -> bool:
    """Whether steps of ``dealt`` ranks are launched kernel by kernel for want of one figure."""
    recordable = never_recorded(dealt.model) is None and dealt.share is not ExpertShare.sliced
    return recordable and dealt.hardware.gpu is not None and not dealt.hardware.links.word_hop_s


def _check(cfg: SolveConfig, question: Question, count: int) -> None:
    q = question
    check_ranks(q.hardware, q.model, q.workload, count)
    if count == 1:
        return
    if cfg.speculate is Speculate.mtp:
        raise UserError(f"ranks={count}: speculate=mtp: further heads read the hidden states of one rank alone yet; set ranks=1")


def may_spare(question: Question) -> bool:
    """Whether the first rank of ``question`` may have fewer layers than usual. Not where the CPU is to compute units, whose turns are
    priced for ranks that have as many of them; nor where the LM head has too few rows to be dealt in proportion."""
    return question.ranks > 1 and not question.force.host_ffn and question.model.vocab >= question.model.layers


def answer_dealt(question: Question, notes: tuple[str, ...] = ()) -> Plan:
    """The plan of all ranks. One decides batch, passes and pages for all: the first one, which has most layers where they are dealt evenly.
    Where they are not and that leaves another none, the next one. Ranks with the same units on the same card decide the same. Costs a solve
    for each kind of rank, four at most where cards are alike, and those of ``acted_nearby``. Raises UserError; ``Infeasible`` when one
    finds no plan."""
    return choose_dealt(question, notes)[0]


def choose_dealt(question: Question, notes: tuple[str, ...] = ()) -> tuple[Plan, Acted | None]:
    """The same, and how it was simulated, where that chose it."""
    refused: list[Infeasible] = []
    for leader in range(question.ranks if question.is_unlike else 1):
        try:
            own = _led(question, leader, notes)
        except Infeasible as error:
            refused.append(error)
            continue

        def nearby(units: int, leader: int = leader) -> Plan:
            return _led(replace(question, force=question.force.but(host_ffn=units)), leader, notes)

        acted = acted_nearby(own, question.force, nearby)
        return (own, None) if acted is None else (replace(acted.plan, notes=(*acted.plan.notes, acted.told)), acted)
    raise refused[0]


def _led(question: Question, leader: int, notes: tuple[str, ...]) -> Plan:
    """The plan in which ``leader`` decides for all. Raises as :func:`answer_dealt` does."""
    q, found = question, dict[object, Decisions]()
    decided: dict[int, Decisions] = {}
    for rank in sorted(range(q.ranks), key=lambda rank: rank != leader):
        asked = q.of_rank(rank)
        kind = q.kind_of(asked)
        if kind not in found:
            force = q.force if rank == 0 else q.force.without("embedding")
            if decided:
                first = decided[leader]
                shared = {name: getattr(first, name) for name in ("prefill_chunk_tokens", "prefill_part_tokens", "recorded_prompt_tokens")}
                force = force.but(page_tokens=first.kv.page_tokens, **shared)
                asked = replace(asked, workload=replace(q.workload, batch=first.batch))
            asked = replace(asked, force=force)
            choice = choose(asked)
            found[kind] = choice.decisions
            if not decided and choice.left is not None:
                notes = (*notes, doubt(choice.left))
        decided[rank] = found[kind]
    each = [decided[rank] for rank in range(q.ranks)]
    if q.share is ExpertShare.sliced:
        each = _alike(each)
    predicted = predict_ranks(q.hardware, q.model, q.workload, each, q.dealing)
    return Plan(q.hardware, q.model, q.workload, each[0], predicted, notes, Ranks.of(each, q.dealing))


def _alike(decided: Sequence[Decisions]) -> list[Decisions]:
    """With as many slots for slices on all ranks as the one with fewest has: so all miss the same ones, since they are routed alike."""
    slots = [made.experts for made in decided if made.experts is not None]
    fewest = {name: min(getattr(one, name) for one in slots) for name in ("vram_slots", "dram_slots")}
    return [made if made.experts is None else replace(made, experts=replace(made.experts, **fewest)) for made in decided]
