"""How many layers lie with the first of several ranks, where a model that drafts lies with it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_rate
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.rank_predictions import predict_each, rank_terms
from penstock.planner.contract.ranks.dealing import Dealing

SAME = 0.005
"""Seconds and tokens a second that differ by no more than this share are the same."""

Tried = Callable[[Dealing], Plan]
"""The plan beside the model that drafts, where layers are dealt so, with as many drafts as pay. UserError where there is none."""


def dealt_beside(usual: Dealing, tried: Tried) -> tuple[Dealing, str]:
    """The dealing with which ``tried`` gives the most tokens a second, and a sentence where it is not the ``usual`` one. Of those that give
    as many the one with most layers of the first rank.

    The first rank's seconds rise with its layers, and the others' fall, so the best number is where they meet: bisection finds it. Costs a
    plan where the first rank does not hold up the others as usually dealt, else some log2 of its layers. UserError, that of the usual one,
    where no plan is left.
    """
    found: dict[int, Plan] = {}
    refused: UserError | None = None
    low, high = 0, usual.counts[0]
    first = high
    while True:
        try:
            made = tried(usual.sparing(first))
        except UserError as error:
            refused = refused or error
            others_lack = bool(found) and first < min(found)
            low, high = (first, high) if others_lack else (low, first)
        else:
            found[first] = made
            low, high = (low, first) if first_binds(made) else (first, high)
        if high - low <= 1:
            break
        first = (low + high) // 2
    if not found:
        assert refused is not None
        raise refused
    rates = {first: plan.prediction.decode_tokens_per_s for first, plan in found.items()}
    best = max(first for first, rate in rates.items() if rate * (1 + SAME) >= max(rates.values()))
    if best == usual.counts[0]:
        return usual, ""
    usual_rate = rates.get(usual.counts[0])
    without = f"{show_rate(usual_rate) if usual_rate else 'no plan'} with {usual.counts[0]}"
    return usual.sparing(best), (
        f"rank 0 has {best} of {usual.layers} layers, since the drafter lies there: {show_rate(rates[best])} tokens/s, {without}"
    )


def first_binds(plan: Plan) -> bool:
    """Whether the first rank's steps take longer than the others'."""
    own, *others = predict_each(rank_terms(plan.hardware, plan.model, plan.workload, plan.ranks.decided(plan.decisions), plan.dealing))
    return own.decode_s_per_token > max(other.decode_s_per_token for other in others) * (1 + SAME)
