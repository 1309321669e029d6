"""In which tier each layer's KV lies: a plan's page counts laid out over the layers, the same for planner and runtime."""

from __future__ import annotations

from penstock.planner.contract.decided.decisions import KvPages, Tier
from penstock.planner.contract.decided.placement import split


def attended_on_host(layers: int, kv: KvPages) -> tuple[int, ...]:
    """Layers in DRAM whose attention the CPU computes in decode steps, evenly spread between the others outside VRAM: link and CPU then
    work at the same time."""
    in_dram = [layer for layer, tier in enumerate(kv_tiers(layers, kv)) if tier is Tier.dram]
    return tuple(split(in_dram, min(kv.host_layers, len(in_dram)))[0])


def kv_tiers(layers: int, kv: KvPages) -> tuple[Tier, ...]:
    """One tier a layer. Those outside VRAM are spread over a pass, so that their copies have all of it, and among them the SSD's."""
    a_layer = max(1, kv.pages // layers)
    in_vram, others = split(range(layers), kv.vram_pages // a_layer)
    in_dram, _ = split(others, kv.dram_pages // a_layer)
    return tuple(Tier.vram if i in in_vram else Tier.dram if i in in_dram else Tier.ssd for i in range(layers))
