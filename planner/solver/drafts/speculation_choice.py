"""How many tokens a plan has drafted: by what a pass of more rows takes, and the share of drafts that it counts on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.speculating import DEFAULT_ACCEPTANCE, MOST_DRAFTS, Drafter, Speculate, Speculation
from penstock.planner.contract.lessons.draft_lesson import DraftLesson, counting_on, stands_on, timed
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.solver.drafts.draft_choice import Solve, beside_drafter, drafted, with_room
from penstock.planner.solver.drafts.served_speculation import served_with_drafts


def speculating(
    plan: Plan, asked: Speculate, tokens: int | None, drafter: Speculation | None, solve: Solve, seen: Sequence[DraftLesson] = ()
) -> Plan:
    """``plan`` with drafts as ``asked``, ``tokens`` of them where that is not None, by ``drafter`` where it has weights; ``solve`` answers
    the same question on another machine. ``auto`` drafts only where it pays, by what runs have ``seen`` of drafts; a note says on which
    acceptance the plan counts. UserError where nobody would use drafts, or where the drafter leaves no room for a plan."""
    if asked is Speculate.none:
        if tokens:
            raise UserError(f"force.speculate_tokens={tokens}: nobody drafts; set speculate=lookup, or leave it out")
        return plan
    drafting, notes, text = [], list(plan.notes), plan.workload.name
    if asked in (Speculate.auto, Speculate.lookup):
        lookup = Speculation(Drafter.lookup, 0, DEFAULT_ACCEPTANCE[Drafter.lookup])
        drafting.append((plan, counting_on(lookup, seen, text)))
    if drafter is not None:
        try:
            known = counting_on(drafter, seen, text)
            alone = known if plan.workload.is_served else timed(known, seen, plan.decisions.batch)
            drafting.append((beside_drafter(plan, drafter, solve), alone))
        except UserError as error:
            if asked is not Speculate.auto:
                raise
            notes.append(str(error))
    if plan.workload.is_served:
        return with_room(served_with_drafts(replace(plan, notes=tuple(notes)), drafting, asked, tokens, seen), solve)
    tried = [longest_paying(beside, known, tokens) for beside, known in drafting]
    best = max(tried, key=lambda one: one.prediction.decode_tokens_per_s)
    if asked is Speculate.auto and best.prediction.decode_tokens_per_s <= plan.prediction.decode_tokens_per_s:
        counted = " or ".join(dict.fromkeys(stands_on(one.decisions.speculation, seen, text) for one in tried))
        return replace(plan, notes=(*notes, f"no tokens are drafted: more rows cost more than they give, where a plan {counted}"))
    best, chosen = with_room(best, solve), best.decisions.speculation
    return replace(best, notes=(*notes, f"drafts by {chosen.drafter}: the prediction {stands_on(chosen, seen, text)}"))


def longest_paying(plan: Plan, drafter: Speculation, tokens: int | None) -> Plan:
    """``plan`` with as many drafts by ``drafter`` as give the most tokens a second; with ``tokens`` where that is not None."""
    counts = range(1, MOST_DRAFTS + 1) if tokens is None else [tokens]
    tried = [drafted(plan, replace(drafter, tokens=count)) for count in counts]
    return max(tried, key=lambda one: one.prediction.decode_tokens_per_s)
