"""How many tokens a plan has drafted: by what a pass of more rows takes, and the share of drafts that it counts on."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.speculating import DEFAULT_ACCEPTANCE, MOST_DRAFTS, Drafter, Speculate, Speculation
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.cost import predict
from penstock.planner.solver.drafts.served_speculation import served_with_drafts


def speculating(plan: Plan, asked: Speculate, tokens: int | None) -> Plan:
    """``plan`` with drafts as ``asked``, ``tokens`` of them where that is not None. ``auto`` drafts only where it pays; a note says on
    which acceptance the plan counts. UserError where nobody would use them."""
    if asked is Speculate.none:
        if tokens:
            raise UserError(f"force.speculate_tokens={tokens}: nobody drafts; set speculate=lookup, or leave it out")
        return plan
    if plan.workload.is_served:
        return served_with_drafts(plan, asked, tokens)
    drafter = Drafter.lookup
    acceptance = DEFAULT_ACCEPTANCE[drafter]
    tried = [
        drafted(plan, Speculation(drafter, count, acceptance)) for count in (range(1, MOST_DRAFTS + 1) if tokens is None else [tokens])
    ]
    best = max(tried, key=lambda one: one.prediction.decode_tokens_per_s)
    if asked is Speculate.auto and best.prediction.decode_tokens_per_s <= plan.prediction.decode_tokens_per_s:
        return replace(
            plan, notes=(*plan.notes, f"no tokens are drafted: with {acceptance:.0%} of them kept a pass of more rows costs more")
        )
    note = f"drafts by {drafter}: the prediction counts on {acceptance:.0%} of them kept, before a run has measured it"
    return replace(best, notes=(*plan.notes, note))


def drafted(plan: Plan, speculation: Speculation) -> Plan:
    """``plan`` with ``speculation``, predicted anew."""
    decisions = replace(plan.decisions, speculation=speculation)
    return replace(plan, decisions=decisions, prediction=predict(plan.hardware, plan.model, plan.workload, decisions))
