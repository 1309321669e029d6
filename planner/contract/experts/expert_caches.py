"""The expert caches of a plan: one for each tier, as simulator and runtime both ask them."""

from __future__ import annotations

from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.contract.experts.expert_cache import ExpertCache
from penstock.planner.contract.experts.expert_slots import kept_slots
from penstock.planner.contract.experts.policies import AheadScores, FarSight, make_expert_policy
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.planner.contract.given.model import Experts

LIKELY = ExpertSlots.least_chance
"""Where nothing else is decided."""


def expert_caches(experts: Experts, slots: ExpertSlots, gpu: bool) -> tuple[ExpertCache | None, ExpertCache]:
    """What decides for VRAM (None without a GPU) and for DRAM. Both ask one policy, and go by one foresight of farther layers, where the
    policy asks routers beforehand."""
    shape = len(experts.layers), experts.count, experts.top_k

    def cache(number: int, above: ExpertCache | None, most_ahead: int) -> ExpertCache:
        number = min(number, experts.units)
        return ExpertCache(kept_slots(experts, number), number, experts.count, policy, above, far, Prefetch(most_ahead, slots.least_chance))

    policy = make_expert_policy(slots.policy, *shape)
    far = FarSight(*shape, slots.least_chance) if policy.needs_ahead is AheadScores.router else None
    vram = cache(slots.vram_slots, None, slots.prefetch) if gpu else None
    return vram, cache(slots.dram_slots, vram, slots.read_ahead if gpu else slots.prefetch)


def keep_first(experts: Experts, vram: ExpertCache | None, dram: ExpertCache) -> None:
    """Keep in both tiers what a start fills them with: DRAM each layer's first experts, VRAM those behind them. So the tiers hold as many
    different experts as they can. Slots of VRAM that are left have a layer's first experts, which DRAM holds, too."""
    for layer in experts.layers:
        in_dram = [expert for expert in range(experts.count) if dram.keep(layer, expert) is not None]
        if vram is not None:
            for expert in (*range(len(in_dram), experts.count), *in_dram):
                vram.keep(layer, expert)
