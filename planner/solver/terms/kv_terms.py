"""The KV of running sequences in the integer program: each layer's tier, what it takes and how long it moves."""

from __future__ import annotations

import pulp

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.prices.sizes import OVERHEADS
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.terms.linear import MB, LinearProgram
from penstock.planner.solver.terms.page_menu import PageChoice
from penstock.planner.solver.terms.problem import Problem


class KvTerms:
    """Whole layers by tier: where the model computes, unless the workload lets them spill. Sizes in MB."""

    def __init__(self, program: LinearProgram, problem: Problem, page: PageChoice):
        self.passing: dict[Tier, pulp.LpVariable] = {}
        """Layers' slots of DRAM and VRAM that spilled layers pass through."""
        self._program, self._page, self._gpu, self._n = program, page, problem.hardware.gpu, problem.model.layers
        spill = problem.workload.kv_spill
        free = {
            Tier.vram: self._gpu is not None,
            Tier.dram: spill or self._gpu is None,
            Tier.ssd: spill and page.page_tokens >= LIMITS.ssd_page_tokens_min,
        }
        self.layers = {tier: program.integer(f"kv_{tier}", 0, self._n) if free[tier] else 0 for tier in Tier}
        program.add(pulp.lpSum(self.layers.values()) == self._n)

    def spill(self, all_cached: pulp.LpVariable) -> pulp.LpVariable:
        """The slots that spilled layers pass through, and whether the SSD is read at all."""
        program = self._program
        ssd_busy = program.integer("ssd_busy", 0, 1)
        program.add(ssd_busy >= 1 - all_cached)
        program.add(self.layers[Tier.ssd] <= self._n * ssd_busy)
        self.passing[Tier.dram] = self._slots(self.layers[Tier.ssd], "ssd")
        if self._gpu:
            self.passing[Tier.vram] = self._slots(self.layers[Tier.dram] + self.layers[Tier.ssd], "outside")
        return ssd_busy

    def _slots(self, layers: pulp.LpAffineExpression, name: str) -> pulp.LpVariable:
        """At least as many slots as ``layers``, up to the full ring of them."""
        slots = self._program.amount(f"kv_slots_{name}", OVERHEADS.kv_ring_slots)
        few = self._program.integer(f"kv_few_{name}", 0, 1)
        self._program.add(slots >= layers - self._n * (1 - few))
        self._program.add(slots >= OVERHEADS.kv_ring_slots * (1 - few))
        return slots

    def mb(self, *tiers: Tier) -> pulp.LpAffineExpression:
        """In all of ``tiers``."""
        return pulp.lpSum(self.layers[tier] for tier in tiers) * (self._page.layer_bytes / MB)

    def spilled_mb(self) -> pulp.LpAffineExpression:
        """Outside VRAM."""
        return self.mb(Tier.dram, Tier.ssd) if self._gpu else pulp.lpSum([])
