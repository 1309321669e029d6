"""Whether restoring pages is faster than computing them again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.cost import Stage, lookup_s, predict, prefill_compute_s, prefill_passes
from planner.decisions import Tier
from planner.plan import Plan
from planner.units import GB
from planner.workload import Workload


class Worth:
    """Seconds by the cost model of ``plan``, with ``read_gbps`` as the rate of the pages' disk and ``page_bytes`` of a page of all
    layers."""

    def __init__(self, plan: Plan, read_gbps: float, page_bytes: int):
        self._plan, self._page_bytes = plan, page_bytes
        gpu, kv, copy_s = plan.hardware.gpu, plan.decisions.kv, 1 / plan.hardware.dram_copy_gbps
        self._s_per_gb = {"disk": 1 / read_gbps, "copy": copy_s}
        self._links = {Tier.dram: ("copy",), Tier.ssd: ("disk", "copy")}
        if gpu is not None:
            on_card = kv.vram_pages / max(1, kv.pages)
            scatter = 2 / gpu.memory_gbps  # read and written
            self._s_per_gb |= {"copy": (1 - on_card) * copy_s, "link": on_card / gpu.h2d.at(page_bytes), "scatter": on_card * scatter}
            self._links = {tier: (*links, "link", "scatter") for tier, links in self._links.items()} | {Tier.vram: ("scatter",)}
        self._known_s: dict[tuple[int, int], float] = {}

    def restore_s(self, pages: Mapping[Tier, int]) -> float:
        """To bring so many pages of each tier to where they are computed with. Links work side by side, so it is the slowest one's time,
        and one page's through the others, which nothing hides."""
        busy = dict.fromkeys(self._s_per_gb, 0.0)
        for tier, count in pages.items():
            for name in self._links[tier]:
                busy[name] += count * self._page_s(name)
        slowest = max(busy, key=busy.__getitem__)
        return busy[slowest] + sum(self._page_s(name) for name, seconds in busy.items() if seconds and name != slowest)

    def prefill_s(self, batch: int, length: int, start: int) -> float:
        """To compute tokens ``start`` to ``length`` of ``batch`` prompts.

        Transfers are a matter of passes: as long as the rest takes one, streamed weights move all the same. The rest attends to all tokens
        before it, so its compute is that of the whole less that of the beginning, but no less than that of a prompt of its length.
        """
        rest = self._work(batch, length - start)
        compute_s = self._compute_s(rest)
        if start:
            compute_s = max(compute_s, self._compute_s(self._work(batch, length)) - self._compute_s(self._work(batch, start)))
        return max(compute_s, self._transfers_s(batch, prefill_passes(rest, self._plan.decisions.prefill_chunk_tokens)))

    def _page_s(self, link: str) -> float:
        return self._page_bytes / GB * self._s_per_gb[link]

    def _work(self, batch: int, tokens: int) -> Workload:
        return replace(self._plan.workload, batch=batch, prompt_tokens=tokens)

    def _compute_s(self, work: Workload) -> float:
        plan, chunk = self._plan, self._plan.decisions.prefill_chunk_tokens
        seconds = prefill_compute_s(plan.hardware, plan.model, work, work.batch, chunk)
        if plan.hardware.gpu is not None and plan.decisions.weights.embedding is Tier.dram:
            seconds += lookup_s(plan.model, work.batch * work.prompt_tokens, prefill_passes(work, chunk))
        return seconds

    def _transfers_s(self, batch: int, passes: int) -> float:
        """The slowest link's seconds in so many passes over the model, computed once: the same for all lengths that take as many."""
        if (batch, passes) not in self._known_s:
            plan, made = self._plan, replace(self._plan.decisions, batch=batch)
            tokens = passes * min(made.prefill_chunk_tokens, plan.workload.max_tokens)
            stages = predict(plan.hardware, plan.model, self._work(batch, tokens), made).prefill_stages
            self._known_s[batch, passes] = max(seconds for stage, seconds in stages.items() if stage != Stage.compute)
        return self._known_s[batch, passes]
