"""Notes on the KV that a plan keeps for later prompts: why pages have their size, and why some of the set is not kept."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.contract.bills.reuse import held, kept_set
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.terms.page_menu import told


def reuse_notes(plan: Plan, force: Force) -> Iterator[str]:
    """Sentences for the plan's notes; none where the workload keeps nothing."""
    work, kv = plan.workload, plan.decisions.kv
    if not work.kept_tokens:
        return
    kept = kept_set(work, kv.page_tokens)
    if not kept.pages:
        yield (
            f"no KV is kept: workload.shared_prefix_tokens={work.shared_prefix_tokens}, kept_tokens={work.kept_tokens} fill no page of "
            f"{kv.page_tokens} tokens; pages have {LIMITS.page_tokens[0]} at least, and an SSD takes {LIMITS.ssd_page_tokens_min}"
        )
        return
    found = sum(held(plan.model, kv, kept).values())
    if found:
        yield told(plan.hardware, plan.model, work, kv.page_tokens, force.page_tokens is not None)
    if found < kept.pages:
        yield _missing(plan, found, kept.pages)


def _missing(plan: Plan, found: int, wanted: int) -> str:
    tiers = plan.break_even
    if found:
        return f"{found} of {wanted} pages are kept: no tier has room for more, or restoring more takes longer than computing"
    lengths = [tokens for tokens in (tiers.vram, tiers.dram, tiers.ssd) if tokens is not None]
    if not lengths:
        return (
            f"no KV is kept: of a prompt of {plan.workload.prompt_tokens} tokens, no head is restored sooner than it is computed; what is "
            "left takes a pass over the streamed weights, however little it is"
        )
    if plan.workload.shared_prefix_tokens < min(lengths):
        return (
            f"no KV is kept: restoring pays from {min(lengths)} tokens on, workload.shared_prefix_tokens="
            f"{plan.workload.shared_prefix_tokens} are computed as fast"
        )
    return "no KV is kept: what has room for it gains more by holding weights, and restoring from slower tiers takes longer than computing"
