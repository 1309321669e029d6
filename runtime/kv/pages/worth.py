"""Whether restoring pages is faster than computing them again: the planner's model, at the rates of this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.planner.common.measures import GB
from penstock.planner.contract.bills.prefill import Prefill
from penstock.planner.contract.bills.reuse import restoring
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Resource


class Worth:
    """Seconds by the cost model of ``plan``, with ``read_gbps`` as the rate of the pages' disk. A plan that keeps layers' KV outside VRAM
    moves their part of a page in DRAM alone."""

    def __init__(self, plan: Plan, read_gbps: float):
        self._plan, kv = plan, plan.decisions.kv
        rates = restoring(plan.hardware, plan.model, kv.page_tokens, plan.decisions.weights.ssd.queue_depth)
        self._rates = replace(rates, ssd_gbps=read_gbps)
        self._apart = 1 - kv.vram_pages / max(1, kv.pages) if plan.hardware.gpu else 0.0
        self._last: tuple[int, int, Prefill] | None = None

    def restore_s(self, pages: Mapping[Tier, int]) -> float:
        """Seconds to bring so many pages of each tier to where they are computed with. Stages overlap: the slowest one's time, and one
        page's time in each other stage, which nothing hides. The bus is the exception: it works while they do."""
        farthest = [tier for tier in Tier if pages.get(tier)][-1:]
        stages, first = self._stages(pages), self._stages(dict.fromkeys(farthest, 1))
        slowest = max(stages, key=stages.__getitem__)
        return stages[slowest] + sum(seconds for stage, seconds in first.items() if stage not in (slowest, Resource.dram))

    def prefill_s(self, lengths: Sequence[int], starts: Sequence[int]) -> float:
        """Seconds to compute the rest of prompts of ``lengths`` tokens behind their first ``starts``. Unequal prompts count as equal ones
        with as many tokens to compute behind a prefix."""
        batch, length = len(lengths), max(lengths)
        start = length - -(-(sum(lengths) - sum(starts)) // batch)
        if self._last is None or self._last[:2] != (batch, length):
            plan, work = self._plan, replace(self._plan.workload, batch=batch, prompt_tokens=length)
            self._last = batch, length, Prefill(plan.hardware, plan.model, work, replace(plan.decisions, batch=batch))
        return self._last[2].seconds(start)

    def _stages(self, pages: Mapping[Tier, int]) -> dict[str, float]:
        on_card = self._rates.bill(pages).seconds
        outside = (pages.get(Tier.dram, 0) + pages.get(Tier.ssd, 0)) * self._rates.page_bytes / GB / self._plan.hardware.copying_gbps
        within = {Resource.ssd: 1.0, Resource.dram: 1.0}
        moved = {str(stage): seconds * within.get(stage, 1 - self._apart) for stage, seconds in on_card.items()}
        return moved | {"copies in DRAM": self._apart * outside}
