"""How many tokens a server's plan has drafted at most: as many as pay where one row is alone. More rows have fewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.planner.contract.decided.speculating import MOST_DRAFTS, Speculate, Speculation
from penstock.planner.contract.lessons.draft_lesson import DraftLesson, stands_on
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_drafts import PlannedDrafts
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.solver.drafts.draft_choice import drafted


def served_with_drafts(
    plan: Plan, drafting: Sequence[tuple[Plan, Speculation]], asked: Speculate, tokens: int | None, seen: Sequence[DraftLesson] = ()
) -> Plan:
    """A server's ``plan`` with drafts as ``asked``: of ``drafting``, which are plans beside drafters, and these, what gives all rows the
    most tokens a second. ``tokens`` of them at most where that is not None. ``auto`` drafts only where one row alone gains, by what runs
    have ``seen`` of drafts. A note says how many drafts rows have, and on which acceptance the plan counts."""
    text = plan.workload.name
    tried = [_longest(beside, known, tokens) for beside, known in drafting]
    paying = [one for one in tried if one[1] and _gains(one[0], plan)] if asked is Speculate.auto else tried
    if not paying:
        counted = " or ".join(dict.fromkeys(stands_on(known, seen, text) for _, known in drafting))
        return replace(plan, notes=(*plan.notes, f"no tokens are drafted: more rows cost more than they give, where a plan {counted}"))
    best, alone, each = max(paying, key=lambda one: one[0].prediction.decode_tokens_per_s)
    known = best.decisions.speculation
    note = (
        f"drafts by {known.drafter}: {alone} behind a row that is alone, {each} behind each of {best.decisions.batch} rows; the prediction "
        f"{stands_on(known, seen, text)}"
    )
    return replace(best, notes=(*plan.notes, note))


def _gains(made: Plan, plain: Plan) -> bool:
    """Whether ``made`` is worth what its drafter takes of ``plain``: nothing, where none has weights."""
    weightless = made.decisions.speculation.model is None
    return weightless or made.prediction.decode_tokens_per_s > plain.prediction.decode_tokens_per_s


def _longest(plan: Plan, known: Speculation, tokens: int | None) -> tuple[Plan, int, int]:
    """``plan`` with as many drafts as pay where one row is alone, or all of them decode -> it, and how many each has then and then."""
    longest = drafted(plan, replace(known, tokens=MOST_DRAFTS if tokens is None else tokens))
    planned = PlannedDrafts(longest, ServeLimits.of(longest), PassPrices(longest))
    alone, each = planned.length(1), planned.length(plan.decisions.batch)
    made = longest if tokens is not None else drafted(plan, replace(known, tokens=max(1, alone, each)))
    return made, alone, each
