"""What one user more costs: within a plan's rows, and beyond them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes, show_rate, show_seconds
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.sizes import kv_page_bytes, pool_pages
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.solver.layer_counts import fastest
from penstock.planner.solver.program import Optimum
from penstock.planner.solver.terms.problem import Question


@dataclass(frozen=True)
class OneMore:
    """Of a plan with ``rows`` sequences at a time."""

    rows: int
    step_s: float
    """A decode step of all rows."""
    last_s: float
    """Of it, what the last row adds."""
    more_bytes: int
    """KV and states that a plan with one row more has more of."""
    base: Optimum | None
    """The fastest plan with as many rows."""
    more: Optimum | None
    """The fastest plan with one row more; None: none fits."""

    def sentences(self) -> Iterator[str]:
        """In words."""
        if self.rows > 1:
            share = f"{self.last_s / self.step_s:.1%} of {show_seconds(self.step_s)}"
            yield f"The last of this plan's {self.rows} users adds {show_seconds(self.last_s)} to a decode step ({share})."
        wanted = f"User {self.rows + 1} takes {show_bytes(self.more_bytes)} of KV"
        if self.more is None or self.base is None:
            yield f"{wanted}: no plan has room for it."
            return
        steps = f"{show_seconds(self.more.decode_s)} instead of {show_seconds(self.base.decode_s)}"
        yield f"{wanted}. A step of the fastest plan then takes {steps}."
        yield f"All users together get {show_rate(1 / self.more.token_s)} tokens/s instead of {show_rate(1 / self.base.token_s)}."


def one_more(question: Question, plan: Plan, advance: Callable[[], None] = lambda: None) -> OneMore:
    """What ``plan``, an answer to ``question``, pays for a user more. Costs two solves; ``advance`` is called after each."""
    work, made, prices = plan.workload, plan.decisions, PassPrices(plan)
    rows, page_tokens = made.batch, made.kv.page_tokens
    context = work.prompt_tokens + work.new_tokens / 2
    step_s = prices.decode_s(rows, context)
    last_s = step_s - prices.decode_s(rows - 1, context) if rows > 1 else step_s
    pages = pool_pages(work, rows + 1, page_tokens) - pool_pages(work, rows, page_tokens)
    more_bytes = pages * plan.model.layers * kv_page_bytes(plan.model, page_tokens) + plan.model.state_bytes
    found = []
    for count in (rows, rows + 1):
        found.append(_fastest(question, count))
        advance()
    return OneMore(rows, step_s, last_s, more_bytes, *found)


def _fastest(question: Question, rows: int) -> Optimum | None:
    work = question.workload
    try:
        return fastest(replace(question, workload=replace(work, batch=rows, requests=max(rows, work.requests))))
    except UserError:  # a forced decision that so many rows do not allow
        return None
