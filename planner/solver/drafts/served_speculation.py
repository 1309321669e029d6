"""How many tokens a server's plan has drafted at most: as many as pay where one row is alone. More rows have fewer."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.contract.decided.speculating import DEFAULT_ACCEPTANCE, MOST_DRAFTS, Drafter, Speculate, Speculation
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.cost import predict
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_drafts import PlannedDrafts
from penstock.planner.contract.serving.serve_limits import ServeLimits


def served_with_drafts(plan: Plan, asked: Speculate, tokens: int | None) -> Plan:
    """A server's ``plan`` with drafts as ``asked``, ``tokens`` of them at most where that is not None. ``auto`` drafts only where one row
    alone gains. A note says how many drafts rows have, and on which acceptance the plan counts."""
    drafter = Drafter.lookup
    acceptance = DEFAULT_ACCEPTANCE[drafter]
    longest = _with(plan, Speculation(drafter, MOST_DRAFTS if tokens is None else tokens, acceptance))
    planned = PlannedDrafts(longest, ServeLimits.of(plan), PassPrices(plan))
    alone, rows = planned.length(1), plan.decisions.batch
    if asked is Speculate.auto and not alone:
        return replace(
            plan, notes=(*plan.notes, f"no tokens are drafted: with {acceptance:.0%} of them kept a pass of more rows costs more")
        )
    made = longest if tokens is not None else _with(plan, Speculation(drafter, max(1, alone), acceptance))
    note = (
        f"drafts by {drafter}: {alone} behind a row that is alone, {planned.length(rows)} behind each of {rows} rows; the prediction "
        f"counts on {acceptance:.0%} of them kept, before a run has measured it"
    )
    return replace(made, notes=(*plan.notes, note))


def _with(plan: Plan, speculation: Speculation) -> Plan:
    decisions = replace(plan.decisions, speculation=speculation)
    return replace(plan, decisions=decisions, prediction=predict(plan.hardware, plan.model, plan.workload, decisions))
