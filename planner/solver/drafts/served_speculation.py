"""How many tokens a server's plan has drafted at most: as many as pay where one row is alone. More rows have fewer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.planner.contract.decided.speculating import DEFAULT_ACCEPTANCE, MOST_DRAFTS, Drafter, Speculate, Speculation
from penstock.planner.contract.lessons.draft_lesson import DraftLesson, counting_on, stands_on
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_drafts import PlannedDrafts
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.solver.drafts.draft_choice import drafted


def served_with_drafts(plan: Plan, asked: Speculate, tokens: int | None, seen: Sequence[DraftLesson] = ()) -> Plan:
    """A server's ``plan`` with drafts as ``asked``, ``tokens`` of them at most where that is not None. ``auto`` drafts only where one row
    alone gains, by what runs have ``seen`` of drafts. A note says how many drafts rows have, and on which acceptance the plan counts."""
    text = plan.workload.name
    known = counting_on(Speculation(Drafter.lookup, 0, DEFAULT_ACCEPTANCE[Drafter.lookup]), seen, text)
    longest = drafted(plan, replace(known, tokens=MOST_DRAFTS if tokens is None else tokens))
    planned = PlannedDrafts(longest, ServeLimits.of(plan), PassPrices(plan))
    alone, rows = planned.length(1), plan.decisions.batch
    if asked is Speculate.auto and not alone:
        none = f"no tokens are drafted: more rows cost more than they give, where a plan {stands_on(known, seen, text)}"
        return replace(plan, notes=(*plan.notes, none))
    made = longest if tokens is not None else drafted(plan, replace(known, tokens=max(1, alone)))
    note = (
        f"drafts by {known.drafter}: {alone} behind a row that is alone, {planned.length(rows)} behind each of {rows} rows; the prediction "
        f"{stands_on(known, seen, text)}"
    )
    return replace(made, notes=(*plan.notes, note))
