"""Rules of resident units, the VRAM ring, the DRAM cache and transfers."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.common.measures import ALIGN, show_bytes
from penstock.planner.contract.decided.decisions import CachePolicy, Decisions, Tier
from penstock.planner.contract.decided.placement import head_block_bytes, head_block_limit, head_blocks
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.contract.rules.rule import BrokenRule, out_of_range


def count_rules(hardware: HardwareProfile, model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    w = d.weights
    units = w.vram.resident_units
    gpu = hardware.gpu is not None
    for kind, value, most in (("attn", units.attn, model.layers), ("ffn", units.ffn, model.layers), ("head", units.head, w.head_blocks)):
        allowed = most if gpu else 0
        if not 0 <= value <= allowed:
            why = "" if gpu else " without a GPU"
            yield out_of_range(f"weights.vram.resident_units.{kind}", value, 0, allowed, why)
    if d.batch < 1:
        yield out_of_range("batch", d.batch, 1)
    if d.prefill_chunk_tokens < 1:
        yield out_of_range("prefill_chunk_tokens", d.prefill_chunk_tokens, 1)
    if not 1 <= w.head_blocks <= model.vocab or (not gpu and w.head_blocks != 1):
        yield out_of_range("weights.head_blocks", w.head_blocks, 1, model.vocab if gpu else 1)
    elif gpu and units.head < w.head_blocks and (block := head_block_bytes(model, w.head_blocks)) > head_block_limit(model):
        unit = "an attention or FFN unit" if model.experts else "an FFN unit"
        yield BrokenRule(
            "head block <= FFN unit",
            f"weights.head_blocks={w.head_blocks} makes LM-head blocks of {show_bytes(block)}; allowed: at most {unit}, "
            f"{show_bytes(head_block_limit(model))}; set head_blocks={head_blocks(model)}",
        )
    if w.embedding not in ((Tier.vram, Tier.dram) if gpu else (Tier.dram,)):
        tiers = "vram or dram" if gpu else "dram, since there is no GPU"
        yield BrokenRule("embedding tier", f"weights.embedding={w.embedding}; allowed: {tiers}; set one of these")
    if gpu and w.vram.prefetch_distance < 0:
        yield out_of_range("weights.vram.prefetch_distance", w.vram.prefetch_distance, 0)
    if gpu and w.vram.slots < w.vram.prefetch_distance + LIMITS.ring_margin:
        yield BrokenRule(
            "vram_slots >= vram_prefetch_distance + 2",
            f"weights.vram.slots={w.vram.slots} with weights.vram.prefetch_distance={w.vram.prefetch_distance}; allowed: at least "
            f"{w.vram.prefetch_distance + LIMITS.ring_margin} slots; raise slots or lower the distance",
        )
    if not gpu and (w.vram.slots, w.vram.prefetch_distance) != (0, 0):
        yield BrokenRule(
            "no VRAM ring without a GPU",
            f"weights.vram.slots={w.vram.slots}, prefetch_distance={w.vram.prefetch_distance}; allowed: 0 without a GPU; set both to 0",
        )


def dram_cache_rules(hardware: HardwareProfile, model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    c = d.weights.dram
    low, high = c.cap_layers + LIMITS.headroom_min, c.cap_layers + LIMITS.headroom_max
    if c.cap_layers < 0:
        yield out_of_range("weights.dram.cap_layers", c.cap_layers, 0)
    if not low <= c.hwm_layers <= high:
        yield BrokenRule(
            "hwm = cap + k, 3 <= k <= 10",
            f"weights.dram.hwm_layers={c.hwm_layers} with cap_layers={c.cap_layers}; allowed: {low} to {high}; "
            f"set hwm_layers={min(max(c.hwm_layers, low), high)}",
        )
    if not c.cap_layers <= c.prefetch_distance <= c.hwm_layers:
        yield BrokenRule(
            "cap <= prefetch_distance <= hwm",
            f"weights.dram.prefetch_distance={c.prefetch_distance} with cap_layers={c.cap_layers}, hwm_layers={c.hwm_layers}; allowed: "
            f"{c.cap_layers} to {c.hwm_layers}; set prefetch_distance={max(c.cap_layers, min(c.hwm_layers, c.prefetch_distance))}",
        )
    units = d.weights.vram.resident_units
    through = model.layers - min(units.attn, units.ffn) if hardware.gpu else model.layers
    if c.cap_layers > through:
        yield BrokenRule(
            "cap <= layers through DRAM",
            f"weights.dram.cap_layers={c.cap_layers}; allowed: at most the {through} layers that are not whole in VRAM; "
            f"set cap_layers={through}",
        )
    kept = c.cap_layers if d.weights.policy is CachePolicy.pinned else 0
    if c.resident_layers != kept:
        yield BrokenRule(
            "resident_layers = cap under pinned, 0 under rolling",
            f"weights.dram.resident_layers={c.resident_layers} with cap_layers={c.cap_layers}, policy={d.weights.policy}; allowed: {kept}; "
            f"set resident_layers={kept}",
        )


def transfer_rules(d: Decisions) -> Iterator[BrokenRule]:
    ssd, h2d = d.weights.ssd, d.weights.h2d
    if ssd.block_bytes < ALIGN or ssd.block_bytes % ALIGN:
        yield BrokenRule(
            "block multiple of 4096",
            f"weights.ssd.block_bytes={ssd.block_bytes}; allowed: positive multiples of {ALIGN} (O_DIRECT); "
            f"set block_bytes={max(ALIGN, ssd.block_bytes // ALIGN * ALIGN)}",
        )
    if ssd.queue_depth < 1:
        yield out_of_range("weights.ssd.queue_depth", ssd.queue_depth, 1)
    elif ssd.staging_bytes < ssd.block_bytes * ssd.queue_depth:
        need = ssd.block_bytes * ssd.queue_depth
        yield BrokenRule(
            "staging >= block x queue depth",
            f"weights.ssd.staging_bytes={ssd.staging_bytes}; allowed: at least {ssd.block_bytes} x {ssd.queue_depth} = {need}; "
            f"set staging_bytes={need}",
        )
    if h2d.chunk_bytes < 1:
        yield out_of_range("weights.h2d.chunk_bytes", h2d.chunk_bytes, 1)
    if h2d.in_flight < 1:
        yield out_of_range("weights.h2d.in_flight", h2d.in_flight, 1)
