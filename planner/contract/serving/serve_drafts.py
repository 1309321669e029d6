"""How many tokens a server drafts behind each of its rows: fewer, the more of them there are."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.schedules import launched_singly
from penstock.planner.contract.prices.memory_law import shapes_wanted
from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.speculation.chain_length import best_length
from penstock.planner.contract.speculation.drafting import counted_s, counted_tokens


class PlannedDrafts:
    """As ``plan`` has them, whose ``prices`` say what a pass of more rows takes."""

    def __init__(self, plan: Plan, limits: ServeLimits, prices: PassPrices):
        self._plan, self._limits, self._prices = plan, limits, prices
        self._drafter = None if plan.drafter is None else PassPrices(plan.drafter)
        self._shapes = shapes_wanted(plan.hardware, plan.model, plan.decisions)
        self._singly = PassPrices(launched_singly(plan))
        self._lengths: dict[int, int] = {}

    def most(self, rows: int) -> int:
        """Drafts behind each of ``rows`` that a pass has room for."""
        return min(self._plan.decisions.speculation.tokens, self._limits.pass_tokens // max(1, rows) - 1)

    def pass_s(self, rows: int) -> Callable[[int], float]:
        """Of a pass in which ``rows`` have so many drafts each, in the middle of their replies; drafting counted."""
        work = self._plan.workload
        context = work.prompt_tokens + work.new_tokens / 2
        return lambda drafts: self.seconds(MixedPass(rows, context, 0, 0.0, drafted=rows * drafts))

    def seconds(self, mixed: MixedPass) -> float:
        """Of any pass, and of drafting for it: a model that drafts takes a step for each place in the chains, which are taken as equal."""
        places = -(-mixed.drafted // max(1, mixed.rows))
        recorded = not places or mixed.tokens or any(shape.rows >= mixed.rows and shape.tokens > places for shape in self._shapes)
        prices = self._prices if recorded else self._singly
        alone_s = self._drafter.decode_s(mixed.rows, mixed.context) if self._drafter is not None and places else 0.0
        return prices.seconds(mixed) + places * alone_s

    def reading_s(self, tokens: int) -> float:
        """In which the drafter reads a prompt of so many ``tokens``, before the first drafts behind it."""
        if self._drafter is None or not self._plan.decisions.speculation.tokens:
            return 0.0
        at_once = self._drafter.plan.decisions.prefill_chunk_tokens
        chunks = [(at, min(at_once, tokens - at)) for at in range(0, tokens, at_once)]
        return sum(self._drafter.seconds(MixedPass(0, 0.0, count, at + count / 2, at)) for at, count in chunks)

    def length(self, rows: int) -> int:
        """Drafts behind each of ``rows``: those that give the most tokens a second."""
        if rows not in self._lengths:
            decided = self._plan.decisions.speculation
            pass_s = self.pass_s(rows)
            plain_s = pass_s(0)
            self._lengths[rows] = best_length(
                self.most(rows), lambda drafts: counted_tokens(decided, drafts) / counted_s(decided, plain_s, pass_s(drafts))
            )
        return self._lengths[rows]

    def behind(self, rooms: Mapping[int, int], chance: random.Random) -> Mapping[int, int]:
        """Row -> its drafts, for rows with room for so many; of some rows there is no proposal."""
        length, share = self.length(len(rooms)) if rooms else 0, self._plan.decisions.speculation.proposes
        return {number: min(length, room) for number, room in rooms.items() if share >= 1 or chance.random() < share} if length else {}

    def kept(self, drafts: int, chance: random.Random) -> int:
        """Of ``drafts`` of a row those up to the first that is wrong, where each is right as the plan counts on."""
        decided = self._plan.decisions.speculation
        shares = (*decided.acceptance_at[:drafts], *[decided.acceptance] * (drafts - len(decided.acceptance_at)))
        return next((k for k, share in enumerate(shares) if chance.random() >= share), drafts)
