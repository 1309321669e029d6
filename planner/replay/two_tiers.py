"""Routings acted out in the two tiers of a plan: what both miss, and what a slot of the smaller one counts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.planner.contract.decided.decisions import ExpertPolicyName, ExpertSlots, MissedExperts
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import expert_caches, keep_first
from penstock.planner.contract.experts.expert_misses import apart_in
from penstock.planner.contract.experts.expert_slots import fewest_slots, kept_in_all
from penstock.planner.contract.experts.host_split import HostSplit
from penstock.planner.contract.experts.policies import make_expert_policy
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.contract.given.model import SECOND_TIER, Experts
from penstock.planner.replay.replayed import hit_curve, passes

SPLITS = ((1 / 4, 1 / 2), (3 / 8, 1 / 4))
"""Shares of all experts that VRAM and DRAM keep while the weight is measured, either the larger once. Of the pairs tried, these predicted
14 others best. With mix, LRU and LFU on three recordings they erred hardly more than the best weight of all.
They never erred more than the default."""

MOST_USES = 50_000
"""Of experts by decode steps, acted out for each split: a second's work with 128 experts a layer, half of it with 8. Of longer routings the
beginning is taken."""


def second_tier(experts: Experts, routings: Routings, policy: ExpertPolicyName) -> float:
    """``Experts.second_tier`` in hundredths: the weight with which the hit curve errs least about what both tiers find of the tokens acted
    out. ``experts.hit_rates`` are those of the whole routings.

    The result lies in [0, 1]. Under LRU both tiers keep much the same, so it may be less than the default, which is mix's. LRU's two tiers
    may find less than the larger one alone; 0 is the least all the same. Slots of two tiers never count for more than as many of one. The
    program's choice of the larger tier, and its bound, rely on both limits. If all weights err alike, because one tier keeps all, the
    default stands.
    """
    shape = replace(experts, layers=tuple(range(routings.layers)))
    splits = [[round(share * shape.units) + fewest_slots(shape) for share in shares] for shares in SPLITS]
    return _weight(shape, routings, [ExpertSlots(vram, dram, policy) for vram, dram in splits], SECOND_TIER)


def second_tier_of(experts: Experts, routings: Routings, slots: ExpertSlots, split: HostSplit | None = None) -> float:
    """The weight acted out in a plan's own ``slots``, of which the CPU computes missed ones by ``split``. The weight as it is: where a tier
    keeps none or all, or where layers differ."""
    kept = [kept_in_all(experts, n) for n in (slots.vram_slots, slots.dram_slots)]
    if routings.layers != len(experts.layers) or not 0 < min(kept) <= max(kept) < experts.units:
        return experts.second_tier
    return _weight(replace(experts, layers=tuple(range(routings.layers))), routings, [slots], experts.second_tier, split)


def _weight(experts: Experts, routings: Routings, splits: Sequence[ExpertSlots], otherwise: float, host: HostSplit | None = None) -> float:
    """With which the curve errs least about ``splits``; of weights that do alike the one nearest to ``otherwise``."""
    part = _beginning(routings, max(1, MOST_USES // (routings.layers * routings.top_k)))
    curve = experts.hit_rates if part is routings else hit_curve(part, splits[0].policy)
    weights = np.linspace(0, 1, 101)
    errors = np.zeros(len(weights))
    counts = 1 - apart_in(MissedExperts.split if host else MissedExperts.copied) * (1 - weights)
    for slots in splits:
        fewer, more = sorted(kept_in_all(experts, n) / routings.layers for n in (slots.vram_slots, slots.dram_slots))
        found = 1 - missed_by_both(experts, slots, part, host)
        errors += (np.interp(more + counts * fewer, range(len(curve)), curve) - found) ** 2
    best = weights[errors <= errors.min() + 1e-9]
    return round(float(best[np.abs(best - otherwise).argmin()]), 2)


def missed_by_both(experts: Experts, slots: ExpertSlots, routings: Routings, split: HostSplit | None = None) -> float:
    """Share of the experts used by decode steps that lie in neither tier, where nothing is fetched ahead. Both begin as a run
    fills them, and what prompts use comes and goes, too. What the CPU computes by ``split`` does not enter VRAM. O(uses), about 10 µs each,
    for many experts a layer twice that.
    """
    needs = make_expert_policy(slots.policy, routings.layers, routings.count, routings.top_k).needs_ahead
    scores = None if needs is None else routings.scores.get(needs)
    vram, dram = expert_caches(experts, slots, gpu=True)
    assert vram is not None
    keep_first(experts, vram, dram)
    missed = 0
    for first, end in passes(routings):
        prompt = not routings.decode[first]
        for layer, chosen in enumerate(routings.experts[first:end].swapaxes(0, 1).astype(np.intp)):
            ahead = scores[first, layer][None] if scores is not None and not prompt and layer + 1 < routings.layers else None
            read = _visit(vram, dram, layer, Routing(chosen, prompt, ahead), None if prompt else split)
            missed += 0 if prompt else read
    return missed / (routings.layers * routings.top_k * int(routings.decode.sum()))


def _visit(vram: ExpertCache, dram: ExpertCache, layer: int, routing: Routing, split: HostSplit | None) -> int:
    """How many experts both tiers missed. In the engine's order: experts in VRAM are used first, then those in DRAM, then those that are
    read. After each use VRAM decides what to evict, then DRAM."""
    near = vram.find(layer, routing.experts)
    far = dram.find(layer, near.misses)
    vram.judge(layer, routing)
    dram.judge(layer, routing)
    aside = {far.hits[at] for at in split.on_host((1,) * len(far.hits))} if split else set()
    dram.set_aside(aside)
    for expert in near.hits:
        settle(vram, layer, expert)
    for expert in (*far.hits, *far.misses):
        if expert in aside:
            settle(dram, layer, expert)
            continue
        vram.take(layer, expert)
        if expert in far.misses:
            dram.take(layer, expert)
        settle(vram, layer, expert)
        settle(dram, layer, expert)
    return len(far.misses)


def settle(cache: ExpertCache, layer: int, expert: int) -> None:
    """``expert`` was used: what ``cache`` evicts for it leaves its slot."""
    for slot in cache.settle(layer, expert):
        cache.give_back(slot)


def _beginning(routings: Routings, steps: int) -> Routings:
    """Up to its decode step number ``steps``; all of them where there are no more."""
    decoded = np.flatnonzero(routings.decode)
    if len(decoded) <= steps:
        return routings
    part = slice(int(decoded[steps - 1]) + 1)
    scores = {name: of[part] for name, of in routings.scores.items()}
    return replace(routings, experts=routings.experts[part], prompt=routings.prompt[part], decode=routings.decode[part], scores=scores)
