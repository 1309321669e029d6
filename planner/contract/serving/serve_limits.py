"""How much a server takes on at once."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.contract.serving.pass_prices import PassPrices


@dataclass(frozen=True)
class ServeLimits:
    """ValueError where they contradict each other."""

    rows: int
    """Sequences that live at once."""
    pass_tokens: int
    """Tokens that one pass carries: one for each row that decodes, the rest for prompts."""
    page_tokens: int
    """Tokens of a KV page."""
    pages: int
    """KV pages of the pool. A page has all layers."""
    queue: int
    """Requests that wait at most."""

    def __post_init__(self) -> None:
        if min(self.rows, self.page_tokens, self.pages, self.queue) < 1:
            raise ValueError(f"{self}; allowed: 1 or more of each")
        if self.pass_tokens < self.rows:
            raise ValueError(f"pass_tokens={self.pass_tokens}; allowed: {self.rows} or more, one for each of the rows")

    @classmethod
    def of(cls, plan: Plan) -> ServeLimits:
        """Of a server's plan as decided. Another plan's batch is its rows. A pass then carries as many prompt tokens as take no longer to
        compute than its weights to come, or as are worth a pass, within those that the plan has memory for."""
        made, kv, work = plan.decisions, plan.decisions.kv, plan.workload
        layers = plan.of_rank(0).model.layers
        rows = made.batch
        if work.is_served:
            prompt_tokens = made.prefill_chunk_tokens
        else:
            room = rows * min(made.prefill_chunk_tokens, work.prompt_tokens) - rows
            balanced = PassPrices(plan).balanced_tokens(rows, room)
            prompt_tokens = min(room, max(balanced, LIMITS.chunk_min_tokens))
        return cls(rows, rows + max(0, prompt_tokens), kv.page_tokens, kv.pages // layers, work.queue)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the whole pool: what one sequence may have."""
        return self.pages * self.page_tokens

    def pages_of(self, tokens: int) -> int:
        """Pages that hold ``tokens`` of one sequence."""
        return -(-tokens // self.page_tokens)
