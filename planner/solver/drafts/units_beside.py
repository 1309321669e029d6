"""How many units the CPU computes for each of several ranks, where a model that drafts lies with the first one."""

from __future__ import annotations

from collections.abc import Callable

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_rate
from penstock.planner.contract.decided.recording import can_record
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.solver.drafts.layers_beside import SAME

STEPS = 6
"""From as many units as pay without drafts down to none."""


def handed_beside(plain: Plan, tried: Callable[[int], Plan], known_rate: float) -> tuple[int, str]:
    """FFN units of each rank that the CPU computes in steps that verify, and a sentence of it; none where ``tried`` with any gives no more
    tokens a second than ``known_rate``, which the best deal gives without them.

    ``plain`` is the plan without drafts. A step that verifies has more rows, which take the CPU longer, so it has no more units than that,
    and they are fewer while that gives more. Only recorded steps hand units over and verify. Costs a plan for each try, ``STEPS`` at most.
    """
    first, most = plain.of_rank(0), plain.decisions.weights.host.ffn
    if not most or not can_record(first.hardware, first.model):
        return 0, ""
    best, best_rate, rate = 0, 0.0, 0.0
    for units in range(most, 0, -max(1, most // STEPS)):
        try:
            rate = tried(units).prediction.decode_tokens_per_s
        except UserError:  # no plan has as many beside the drafter
            continue
        if rate <= best_rate:
            break
        best, best_rate = units, rate
    if best_rate <= known_rate * (1 + SAME):
        return 0, ""
    return best, (
        f"the CPU computes {best} FFN units of each rank, with layers as usually dealt: {show_rate(best_rate)} tokens/s, "
        f"{show_rate(known_rate)} with none, however layers are dealt"
    )
