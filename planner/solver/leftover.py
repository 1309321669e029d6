"""Memory that the program left idle goes to kept pages, up to the whole set, if that costs no time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.planner.contract.bills.cost import objective_s, predict
from penstock.planner.contract.bills.prefill import Prefill
from penstock.planner.contract.bills.reuse import KeptSet, kept_set, pays
from penstock.planner.contract.decided.decisions import Decisions, KvReuse, Tier
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.memory_law import dram_use, ssd_need, vram_use
from penstock.planner.contract.prices.sizes import kept_file_bytes, kept_file_pages, kept_page_bytes
from penstock.planner.contract.rules.broken import broken_rules


def keep_more(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> Decisions:
    """``decisions`` with pages moved up from slower tiers, and pages added that had found no room. The SSD's copies are complete, so that a
    later process finds all. A tier from which a whole prefix is restored no faster than computed gets copies alone."""
    kept = kept_set(workload, decisions.kv.page_tokens)
    prefill = Prefill(hardware, model, workload, decisions)
    tiers = [tier for tier in Tier if not kept.prefix_pages or pays(prefill, tier, kept.prefix_pages)]
    predicted = predict(hardware, model, workload, decisions)
    if kept.prefix_pages and not predicted.restored_tokens:
        decisions = replace(decisions, kv=replace(decisions.kv, reuse=KvReuse()))
    if not kept.pages or not tiers:
        return decisions
    best_s = predicted.total_s
    for tier in Tier:
        for reuse in _larger(hardware, model, workload, decisions, kept, tier, tier in tiers):
            larger = replace(decisions, kv=replace(decisions.kv, reuse=reuse))
            if broken_rules(hardware, model, workload, larger):
                continue
            seconds = objective_s(hardware, model, workload, larger)
            if seconds <= best_s:
                decisions, best_s = larger, seconds
                break
    return decisions


def _larger(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, kept: KeptSet, tier: Tier, paying: bool
) -> Iterator[KvReuse]:
    """More pages in ``tier``, the most first."""
    kv, reuse = decisions.kv, decisions.kv.reuse
    page = kept_page_bytes(model, kv.page_tokens)
    if tier is Tier.vram and paying:
        free = hardware.vram_bytes - sum(vram_use(hardware, model, workload, decisions).values())
        vram = min(kept.pages, reuse.vram_pages + free // page)
        yield replace(reuse, vram_pages=vram, dram_pages=min(reuse.dram_pages, kept.pages - vram))
    elif tier is Tier.dram and paying:
        free = hardware.dram_bytes - sum(dram_use(hardware, model, workload, decisions).values())
        yield replace(reuse, dram_pages=min(kept.pages - reuse.vram_pages, reuse.dram_pages + free // page))
    elif tier is Tier.ssd:
        free = reuse.ssd_bytes + hardware.ssd_bytes - sum(ssd_need(hardware, model, workload, decisions).values())
        fits = kept_file_pages(model, replace(kv, reuse=KvReuse(0, 0, free)))
        copies = reuse.vram_pages + reuse.dram_pages
        for pages in {kept.pages if paying else copies: None, copies: None}:
            yield replace(reuse, ssd_bytes=max(reuse.ssd_bytes, kept_file_bytes(model, kv.page_tokens, min(pages, fits))))
