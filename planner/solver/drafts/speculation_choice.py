"""How many tokens a plan has drafted: by what a pass of more rows takes, and the share of drafts that it counts on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.speculating import DEFAULT_ACCEPTANCE, MOST_DRAFTS, Drafter, Speculate, Speculation
from penstock.planner.contract.lessons.draft_lesson import DraftLesson, counting_on, stands_on, timed
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.solver.drafts.draft_choice import Solve, beside_drafter, drafted, with_room
from penstock.planner.solver.drafts.layers_beside import dealt_beside
from penstock.planner.solver.drafts.served_speculation import served_with_drafts
from penstock.planner.solver.drafts.units_beside import handed_beside

Redealt = Callable[[Dealing, int], Solve]
"""The same question where layers are dealt so, and the CPU computes so many FFN units of each rank."""


def speculating(
    plan: Plan,
    asked: Speculate,
    tokens: int | None,
    drafter: Speculation | None,
    solve: Solve,
    seen: Sequence[DraftLesson] = (),
    redealt: Redealt | None = None,
) -> Plan:
    """``plan`` with drafts as ``asked``, ``tokens`` of them where that is not None, by ``drafter`` where it has weights; ``solve`` answers
    the same question on another machine, ``redealt`` where layers may be dealt otherwise. ``auto`` drafts only where it pays, by what runs
    have ``seen`` of drafts; a note says on which acceptance the plan counts. UserError where nobody would use drafts, or where the drafter
    leaves no room for a plan."""
    if asked is Speculate.none:
        if tokens:
            raise UserError(f"force.speculate_tokens={tokens}: nobody drafts; set speculate=lookup, or leave it out")
        return plan
    drafting, notes, text, why_so = [], list(plan.notes), plan.workload.name, ""
    if asked in (Speculate.auto, Speculate.lookup):
        lookup = Speculation(Drafter.lookup, 0, DEFAULT_ACCEPTANCE[Drafter.lookup])
        drafting.append((plan, counting_on(lookup, seen, text)))
    if drafter is not None:
        try:
            known = counting_on(drafter, seen, text)
            alone = known if plan.workload.is_served else timed(known, seen, plan.decisions.batch)
            if redealt is None:
                beside = beside_drafter(plan, drafter, solve)
            else:
                beside, why_so = _dealt(plan, drafter, alone, tokens, redealt)
            drafting.append((beside, alone))
        except UserError as error:
            if asked is not Speculate.auto:
                raise
            notes.append(str(error))
    if plan.workload.is_served:
        served = with_room(served_with_drafts(replace(plan, notes=tuple(notes)), drafting, asked, tokens, seen), solve)
        return _saying(why_so, served)
    tried = [longest_paying(beside, known, tokens) for beside, known in drafting]
    best = max(tried, key=lambda one: one.prediction.decode_tokens_per_s)
    if asked is Speculate.auto and best.prediction.decode_tokens_per_s <= plan.prediction.decode_tokens_per_s:
        counted = " or ".join(dict.fromkeys(stands_on(one.decisions.speculation, seen, text) for one in tried))
        return replace(plan, notes=(*notes, f"no tokens are drafted: more rows cost more than they give, where a plan {counted}"))
    best, chosen = with_room(best, solve), best.decisions.speculation
    said = replace(best, notes=(*notes, f"drafts by {chosen.drafter}: the prediction {stands_on(chosen, seen, text)}"))
    return _saying(why_so, said)


def _dealt(plan: Plan, drafter: Speculation, alone: Speculation, tokens: int | None, redealt: Redealt) -> tuple[Plan, str]:
    """``plan`` beside ``drafter``, which drafts as ``alone``, with layers dealt, or units handed to the CPU, as gives the most tokens a
    second -> it, and why it is not as usual."""
    found: dict[tuple[Dealing, int], Plan] = {}
    rates: dict[tuple[Dealing, int], float] = {}

    def tried(dealing: Dealing, host_ffn: int = 0) -> Plan:
        nearest = next(reversed(found.values()), plan)  # beside which the drafter takes about as much
        beside = found[dealing, host_ffn] = beside_drafter(nearest, drafter, redealt(dealing, host_ffn))
        if plan.workload.is_served:  # whose chains are no longer than pay
            made = drafted(beside, replace(alone, tokens=MOST_DRAFTS if tokens is None else tokens))
        else:
            made = longest_paying(beside, alone, tokens)
        rates[dealing, host_ffn] = made.prediction.decode_tokens_per_s
        return made

    dealing, why_so = dealt_beside(plan.dealing, tried)
    handed, why_handed = handed_beside(plan, partial(tried, plan.dealing), rates[dealing, 0])
    return (found[plan.dealing, handed], why_handed) if handed else (found[dealing, 0], why_so)


def _saying(why_so: str, made: Plan) -> Plan:
    """``made``, with ``why_so`` where a model drafts."""
    return replace(made, notes=(*made.notes, why_so)) if why_so and made.decisions.speculation.model is not None else made


def longest_paying(plan: Plan, drafter: Speculation, tokens: int | None) -> Plan:
    """``plan`` with as many drafts by ``drafter`` as give the most tokens a second; with ``tokens`` where that is not None."""
    counts = range(1, MOST_DRAFTS + 1) if tokens is None else [tokens]
    tried = [drafted(plan, replace(drafter, tokens=count)) for count in counts]
    return max(tried, key=lambda one: one.prediction.decode_tokens_per_s)
