"""The KV kept for prompts to come in the integer program: pages by tier, what they take, and the seconds of restoring them."""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.bills.reuse import Restoring, kept_set, restoring
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.prices.price import Resource, computing_of
from penstock.planner.contract.prices.sizes import OVERHEADS
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.terms.linear import LinearProgram
from penstock.planner.solver.terms.menu import SsdChoice
from penstock.planner.solver.terms.page_menu import PageChoice
from penstock.planner.solver.terms.problem import Problem


class KeptTerms:
    """Pages that hold all layers, each counted in the nearest tier that has it. Times are in ticks.

    Without a set to keep there are no variables, and all that they would add is 0.
    """

    page_bytes: int = 0
    bounces: pulp.LpVariable | int = 0
    """Whether pages pass through VRAM."""
    files: pulp.LpAffineExpression | int = 0
    """Bytes on the SSD."""
    restore_t: pulp.LpVariable | int = 0
    """Of a batch, before its first pass."""
    pages: pulp.LpAffineExpression | int = 0

    def __init__(
        self,
        program: LinearProgram,
        problem: Problem,
        page: PageChoice,
        ssd: tuple[Sequence[pulp.LpVariable], Sequence[SsdChoice]],
        ticks_per_s: float,
    ):
        self.set = kept_set(problem.workload, page.page_tokens)
        self.tiers: dict[Tier, pulp.LpVariable | int] = dict.fromkeys(Tier, 0)
        self.on_ssd: pulp.LpVariable | int = 0
        if not self.set.pages:
            return
        self._program, self._problem, self._page = program, problem, page
        most, gpu = self.set.pages, problem.hardware.gpu is not None
        files = page.page_tokens >= LIMITS.ssd_page_tokens_min and not page.page_bytes % ALIGN
        room = {Tier.vram: most if gpu and not problem.workload.kv_spill else 0, Tier.dram: most, Tier.ssd: most if files else 0}
        self.tiers = {tier: program.integer(f"kept_{tier}", 0, room[tier]) for tier in Tier}
        self.pages = pulp.lpSum(self.tiers.values())
        program.add(self.pages <= most)
        self._sizes(most, gpu)
        if self.set.prefix_pages:
            self._times(most, ssd, ticks_per_s)

    def _sizes(self, most: int, gpu: bool) -> None:
        """The SSD has all pages or none: what is found there was not found before, so it lies there beside copies of the others."""
        program, self.page_bytes = self._program, self._rates(1).page_bytes
        self.on_ssd, files = program.integer("kept_files", 0, most), program.integer("kept_any_files", 0, 1)
        program.add(self.on_ssd <= most * files)
        program.add(self.on_ssd <= self.pages)
        program.add(self.tiers[Tier.ssd] <= most * files)
        program.add(self.on_ssd >= self.pages - most * (1 - files))
        self.files = self.on_ssd * (self.page_bytes + ALIGN) + files * (2 * OVERHEADS.kv_segment_bytes)
        if gpu:
            self.bounces = program.integer("kept_bounce", 0, 1)
            program.add(self.tiers[Tier.dram] <= most * self.bounces)
            program.add(files <= self.bounces)

    def _times(self, most: int, ssd: tuple[Sequence[pulp.LpVariable], Sequence[SsdChoice]], ticks_per_s: float) -> None:
        """The slowest stage's seconds: each is in proportion to the pages of its tiers."""
        program, bits, choices = self._program, *ssd
        moved = self.set.moved(self._problem.workload.together(self._problem.batch))
        one = [self._rates(c.queue_depth) for c in choices]
        ssd_s = [rates.bill({Tier.ssd: moved}).of(Resource.ssd) for rates in one]
        outside = one[0].bill({Tier.dram: moved})
        outside_t = max(outside.of(Resource.h2d), outside.of(computing_of(self._problem.hardware))) * ticks_per_s
        self.restore_t = program.amount("restore_t")
        read_t = program.weighted("kept_read", bits, self.tiers[Tier.ssd], most, [s * ticks_per_s for s in ssd_s])
        program.add(self.restore_t >= read_t)
        program.add(self.restore_t >= (self.tiers[Tier.dram] + self.tiers[Tier.ssd]) * outside_t)
        hardware = self._problem.hardware
        if hardware.bus_may_bind(hardware.ssd_peak_gbps, hardware.gpu.h2d.peak if hardware.gpu else 2 * hardware.dram_copy_gbps):
            bus_t = {tier: one[0].bill({tier: moved}).of(Resource.dram) * ticks_per_s for tier in Tier}
            program.add(self.restore_t >= pulp.lpSum(self.tiers[tier] * bus_t[tier] for tier in Tier))

    def _rates(self, queue_depth: int) -> Restoring:
        return restoring(self._problem.hardware, self._problem.model, self._page.page_tokens, queue_depth)
