"""Seconds of a server's passes, by what each carries: the laws of plans, asked for other rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache

from penstock.planner.contract.bills.cost import step_s
from penstock.planner.contract.bills.phase import mixed_phase
from penstock.planner.contract.bills.prefill import Moved, Prefill
from penstock.planner.contract.experts.expert_misses import misses
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.stages import MixedPass, table_is_far

CONTEXT_STEP = 256
"""Tokens between the contexts that are priced. Seconds are linear in the context, but for one bend."""
MOST_PRICED = 1 << 16
NEARLY = 1.05
"""Where compute begins to take longer than the stream, within what a prediction is worth."""


class PassPrices:
    """Of ``plan``, whatever workload it was made for. Prices are kept once they were asked for. Those of several ranks are the first one's,
    which wait for the others."""

    def __init__(self, plan: Plan):
        self.plan = plan.of_rank(0)
        self._decoding = lru_cache(MOST_PRICED)(self._decoding_at)
        self._mixed = lru_cache(MOST_PRICED)(self._mixed_at)

    @cached_property
    def pool_tokens(self) -> int:
        """Tokens that the pool of KV has room for."""
        kv = self.plan.decisions.kv
        return kv.pages // self.plan.model.layers * kv.page_tokens

    def decode_s(self, rows: int, context: float) -> float:
        """Of a pass in which ``rows`` sequences decode, each over ``context`` tokens on average."""
        at, rest = divmod(context, CONTEXT_STEP)
        low = self._decoding(rows, int(at))
        apart = min(CONTEXT_STEP, self.pool_tokens // rows - at * CONTEXT_STEP)  # no row has more than its part of the pool
        return low if not rest or apart <= 0 else low + (self._decoding(rows, int(at) + 1) - low) * min(1.0, rest / apart)

    def mixed_s(self, mixed: MixedPass) -> float:
        """Of a pass with prompts in it."""
        near = round(mixed.context / CONTEXT_STEP, 1) * CONTEXT_STEP
        return self._mixed(replace(mixed, context=near, seen=float(round(mixed.seen)), before=float(round(mixed.before))))

    def seconds(self, mixed: MixedPass) -> float:
        """Of any pass."""
        mixed = mixed.undrafted
        return self.mixed_s(mixed) if mixed.tokens else self.decode_s(mixed.rows, mixed.context)

    def balanced_tokens(self, rows: int, most: int) -> int:
        """Prompt tokens beside ``rows`` that decode at which compute takes as long as the stream: those that a pass carries in ``NEARLY``
        the seconds of a pass with one, ``most`` at most."""
        work = self.plan.workload
        context = work.prompt_tokens + work.new_tokens / 2
        low, high = min(1, most), most
        allowed_s = NEARLY * self.mixed_s(MixedPass(rows, context, 1, 0.5))
        while low < high:
            middle = (low + high + 1) // 2
            if self.mixed_s(MixedPass(rows, context, middle, middle / 2)) <= allowed_s:
                low = middle
            else:
                high = middle - 1
        return low

    @cached_property
    def _moved(self) -> Moved:
        return Moved.of(self.plan.hardware, self.plan.model, self.plan.decisions)

    def _decoding_at(self, rows: int, step: int) -> float:
        plan = self.plan
        room = max(1, self.pool_tokens // rows)
        work = replace(plan.workload, prompt_tokens=min(max(1, step * CONTEXT_STEP), room), new_tokens=0, context_tokens=room)
        prefill = Prefill(plan.hardware, plan.model, work, replace(plan.decisions, batch=rows))
        return step_s(prefill, prefill.step())

    def _mixed_at(self, mixed: MixedPass) -> float:
        hardware, model, made = self.plan.hardware, self.plan.model, self.plan.decisions
        phase = mixed_phase(hardware, model, mixed, self.pool_tokens, made.weights.head_blocks, made.weights.forms)
        missed = misses(model, made.experts, phase.rows, hardware.gpu is not None)
        bill = phase.bill(
            self._moved.each_pass(self._moved.units, missed, phase.late), self._moved.kv, table_is_far(hardware, made), self._moved.streamed
        )
        return bill.lasts() + hardware.pass_s
