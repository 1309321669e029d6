"""What the program left idle of each tier is given to the KV of prompts to come, as far as it is worth keeping and costs no time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.cost import predict
from planner.decisions import Decisions, KvReuse
from planner.hardware import HardwareProfile
from planner.memory import dram_use, kept_file_bytes, kept_file_pages, kept_page_bytes, vram_use
from planner.model import ModelSpec
from planner.reuse import KeptSet, kept_set
from planner.rules import broken_rules
from planner.workload import Workload


def keep_more(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> Decisions:
    """``decisions`` with pages moved up from slower tiers, those that found no room added, and the SSD's copies complete, so that a later
    process finds them all. Nothing is kept where the workload's prompts are computed as fast."""
    kept = kept_set(workload, decisions.kv.page_tokens)
    predicted = predict(hardware, model, workload, decisions)
    if not kept.pages or (kept.prefix_pages and not predicted.restored_tokens):
        return replace(decisions, kv=replace(decisions.kv, reuse=KvReuse()))
    best_s = predicted.total_s
    for tier in ("vram", "dram", "ssd"):
        for reuse in _larger(hardware, model, workload, decisions, kept, tier):
            larger = replace(decisions, kv=replace(decisions.kv, reuse=reuse))
            if broken_rules(hardware, model, workload, larger):
                continue
            seconds = predict(hardware, model, workload, larger).total_s
            if seconds <= best_s:
                decisions, best_s = larger, seconds
                break
    return decisions


def _larger(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, kept: KeptSet, tier: str
) -> Iterator[KvReuse]:
    """More pages in ``tier``, those that are worth most first."""
    kv, reuse = decisions.kv, decisions.kv.reuse
    page = kept_page_bytes(model, kv.page_tokens)
    if tier == "vram":
        free = hardware.vram_bytes - sum(vram_use(hardware, model, workload, decisions).values())
        vram = min(kept.pages, reuse.vram_pages + free // page)
        yield replace(reuse, vram_pages=vram, dram_pages=min(reuse.dram_pages, kept.pages - vram))
    elif tier == "dram":
        free = hardware.dram_bytes - sum(dram_use(hardware, model, workload, decisions).values())
        yield replace(reuse, dram_pages=min(kept.pages - reuse.vram_pages, reuse.dram_pages + free // page))
    else:
        free = hardware.ssd_bytes - model.weight_bytes - kv.ssd_pages * (page // model.layers)
        fits = kept_file_pages(model, replace(kv, reuse=KvReuse(0, 0, free)))
        for pages in (min(kept.pages, fits), min(reuse.vram_pages + reuse.dram_pages, fits)):
            yield replace(reuse, ssd_bytes=max(reuse.ssd_bytes, kept_file_bytes(model, kv.page_tokens, pages)))
