"""Seconds a step of 1 to 32 rows: as a fixed batch by a plan of its own, and in the server, where rows join."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from math import ceil

from bench.cases import Row
from bench.clients import COMPLETIONS
from bench.serve_plans import ServePlans
from bench.serve_streams import LeftEarly, climb
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_limits import ServeLimits

COUNTS = "1,2,4,8,16,32"
MOST_STEP = "<= 1.03"
JOINING = 3
"""Passes, at most, from the last token of one count of rows to the first pass with the prompts of the next."""
FAR = 4
"""Compute that by the plan is so many times shorter than the stream is not measured: it binds nothing."""


class StepRows:
    """Cases `rows` and `between`."""

    def __init__(self, rig: ServePlans):
        self.rig = rig

    @property
    def counts(self) -> list[int]:
        """That the server's plan has rows for."""
        most = ServeLimits.of(self.rig.served).rows
        return [count for count in map(int, self.rig.given.get("counts", COUNTS).split(",")) if count <= most]

    @property
    def fixed_counts(self) -> list[int]:
        """That `rows` measures as fixed batches."""
        named = self.rig.given.get("fixed")
        return [count for count in self.counts if named is None or str(count) in named.split(",")]

    def rows(self) -> Iterator[Row]:
        """The fixed batches of ``fixed``, then all counts in the server."""
        self.rig.solve_ahead(self.fixed_counts)
        print(f"  counts={self.counts}: the plan serves {ServeLimits.of(self.rig.served).rows} rows", file=sys.stderr, flush=True)
        yield from self._fixed(self.fixed_counts)
        yield from self._served()

    def between(self) -> Iterator[Row]:
        """The fixed batches that `rows` left out."""
        counts = [count for count in self.counts if count not in self.fixed_counts]
        self.rig.solve_ahead(counts)
        yield from self._fixed(counts)

    def _fixed(self, counts: list[int]) -> Iterator[Row]:
        for count in counts:
            run = self.rig.fixed(count)
            yield self._row("fixed batch", count, run.step_s, run.plan, run.plan.prediction.decode_s_per_token, run.link_gbps)

    def _served(self) -> Iterator[Row]:
        prices, limits, steps = PassPrices(self.rig.served), ServeLimits.of(self.rig.served), self.rig.hybrid.steps
        for count in self.counts:  # before the server is opened, which a measured step would close
            self._compute_s(self.rig.served, count, self.rig.link_gbps)
        server, name = self.rig.server(self.rig.path)
        most = max(self.counts)
        passes = ceil(most * self.rig.prompt / (limits.pass_tokens - limits.rows)) + (steps + JOINING) * len(self.counts)
        new = max(1, limits.pages // most * limits.page_tokens - self.rig.prompt)  # all that is set aside for a row; it goes before its end
        self.rig.say(f"{most} rows join", passes * prices.decode_s(most, self.rig.prompt))
        bodies = self.rig.bodies(name, most, new, seed="rows")
        try:
            stairs = asyncio.run(climb(server.address, COMPLETIONS, bodies, self.counts, steps))
        except LeftEarly as error:
            raise SystemExit(f"{error}; steps={steps} is too many for {new} tokens a row, or counts= too few") from None
        for stair in stairs:
            predicted = prices.decode_s(stair.rows, self.rig.prompt + steps)
            yield self._row("server", stair.rows, stair.gap_s, self.rig.served, predicted, self.rig.link_gbps)

    def _row(self, who: str, count: int, step_s: float, plan: Plan, predicted_s: float, link_gbps: float) -> Row:
        streamed_gb, streamed_s = self._streamed(plan, link_gbps)
        compute_s, how = self._compute_s(plan, count, link_gbps)
        what = f"{streamed_gb:.2f} GB streamed, {streamed_s * 1e3:.1f} ms; compute {compute_s * 1e3:.1f} ms{how}"
        return self.rig.row(f"{count} rows, {who}", what, step_s, max(streamed_s, compute_s), "s", MOST_STEP, predicted_s / step_s)

    def _streamed(self, plan: Plan, link_gbps: float) -> tuple[float, float]:
        """GB of a step over the link, and their seconds."""
        gb = sum(plan.placement.unit_bytes(unit) for unit in plan.placement.step_units) / 1e9
        return gb, gb / link_gbps if link_gbps else 0.0

    def _compute_s(self, plan: Plan, count: int, link_gbps: float) -> tuple[float, str]:
        """Seconds of a step of ``count`` rows whose weights are where they are computed, and how they are known. Where the stream takes
        longer than compute with the most rows does, it does so with fewer, too."""
        streamed_s = self._streamed(plan, link_gbps)[1]
        promised_s = plan.prediction.decode_stages[Resource.card]
        if self.rig.hybrid.card and FAR * promised_s <= streamed_s:
            return promised_s, " by the plan"
        most_s = self.rig.resident(max(self.counts))
        return (most_s if most_s <= streamed_s else self.rig.resident(count)), ""
