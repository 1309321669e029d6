"""The rules that every plan holds. The program has them as constraints; the runtime checks them when it loads a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.decisions import CachePolicy, Decisions, Tier
from planner.hardware import HardwareProfile
from planner.memory import dram_use, kept_file_bytes, kept_file_pages, kv_page_bytes, pages_per_sequence, ssd_need, vram_use
from planner.model import Experts, ModelSpec
from planner.moe.experts import TRANSIT_SLOTS, fewest_slots
from planner.placement import head_block_bytes
from planner.units import ALIGN, GB, align_up, show_bytes
from planner.workload import Workload


@dataclass(frozen=True)
class Limits:
    """The numbers in the rules."""

    headroom_min: int = 3
    """Layers of DRAM cache above ``cap``: one that computes or is copied, one that is ready, one that is being read."""
    headroom_spare: int = 2
    """Slots beyond ``headroom_min`` that are taken where they cost no time, to ride out late reads and copies."""
    headroom_max: int = 10
    """More headroom than this holds layers that residents would hold better."""
    ring_margin: int = 2
    """Ring slots beyond the prefetch distance: the unit that computes and the one that just did."""
    page_tokens: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    ssd_page_tokens_min: int = 64
    """Smaller pages make SSD reads too small."""
    expert_chunks: int = 8
    """Chunks of prefetched experts that a demanded one may have to wait for."""
    layer_read_bytes: int = 500_000
    """A layer of a kept page can be read alone, in reads of this size at least, where any page size gives that."""


LIMITS = Limits()


@dataclass(frozen=True)
class BrokenRule:
    """``message`` is one line: the value, what is allowed, the remedy."""

    name: str
    message: str


def broken_rules(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> list[BrokenRule]:
    """Every rule that ``decisions`` break, in a fixed order; capacities are only computed when the counts make sense."""
    broken = [*_counts(hardware, model, decisions), *_experts(hardware, model, decisions)]
    broken += [*_dram_cache(hardware, model, decisions), *_transfers(decisions)]
    broken += _kv(hardware, model, workload, decisions)
    return broken or list(_capacities(hardware, model, workload, decisions))


def _counts(hardware: HardwareProfile, model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    w = d.weights
    units = w.vram.resident_units
    gpu = hardware.gpu is not None
    for kind, value, most in (("attn", units.attn, model.layers), ("ffn", units.ffn, model.layers), ("head", units.head, w.head_blocks)):
        allowed = most if gpu else 0
        if not 0 <= value <= allowed:
            why = "" if gpu else " without a GPU"
            yield _range(f"weights.vram.resident_units.{kind}", value, 0, allowed, why)
    if d.batch < 1:
        yield _range("batch", d.batch, 1)
    if d.prefill_chunk_tokens < 1:
        yield _range("prefill_chunk_tokens", d.prefill_chunk_tokens, 1)
    if not 1 <= w.head_blocks <= model.vocab or (not gpu and w.head_blocks != 1):
        yield _range("weights.head_blocks", w.head_blocks, 1, model.vocab if gpu else 1)
    elif gpu and units.head < w.head_blocks and (block := head_block_bytes(model, w.head_blocks)) > head_block_limit(model):
        unit = "an attention or FFN unit" if model.experts else "an FFN unit"
        yield BrokenRule(
            "head block <= FFN unit",
            f"weights.head_blocks={w.head_blocks} makes LM-head blocks of {show_bytes(block)}; allowed: at most {unit}, "
            f"{show_bytes(head_block_limit(model))}; set head_blocks={head_blocks(model)}",
        )
    if w.embedding not in ((Tier.vram, Tier.dram) if gpu else (Tier.dram,)):
        allowed = "vram or dram" if gpu else "dram, since there is no GPU"
        yield BrokenRule("embedding tier", f"weights.embedding={w.embedding}; allowed: {allowed}; set one of these")
    if gpu and w.vram.prefetch_distance < 0:
        yield _range("weights.vram.prefetch_distance", w.vram.prefetch_distance, 0)
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


def _experts(hardware: HardwareProfile, model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    slots, experts, gpu = d.experts, model.experts, hardware.gpu
    if slots is None or experts is None:
        if slots is not None or experts is not None:
            allowed = "none for a dense model" if experts is None else "an experts section for a MoE model"
            yield BrokenRule("experts section", f"experts={slots}; allowed: {allowed}; solve again")
        return
    everywhere = gpu is not None and slots.vram_slots >= experts.units
    yield from _expert_slots("vram_slots", slots.vram_slots, experts, 0 if gpu is None else None)
    yield from _expert_slots("dram_slots", slots.dram_slots, experts, None, everywhere)
    if not 0 <= slots.prefetch <= experts.top_k:
        yield _range("experts.prefetch", slots.prefetch, 0, experts.top_k, ", the experts of one token")
    if not 1 <= slots.in_flight <= LIMITS.expert_chunks:
        yield _range("experts.in_flight", slots.in_flight, 1, LIMITS.expert_chunks)
    low, high = expert_chunk_range(hardware, experts)
    if not low <= slots.chunk_bytes <= high:
        yield _range("experts.chunk_bytes", slots.chunk_bytes, low, high)


def _expert_slots(name: str, value: int, experts: Experts, only: int | None, idle: bool = False) -> Iterator[BrokenRule]:
    """``only`` is all that is allowed, where it is given; ``idle`` allows none."""
    least, most = fewest_slots(experts), experts.units
    if only is not None:
        if value != only:
            yield BrokenRule("expert slots", f"experts.{name}={value}; allowed: {only} without a GPU; set it so")
    elif value > most:
        yield BrokenRule("expert slots", f"experts.{name}={value}; allowed: at most {most}, one for each expert; set {name}={most}")
    elif value < least and not (idle and value == 0):
        why = f"one token's experts in a layer are {experts.top_k}, and {min(TRANSIT_SLOTS, most)} pass through at once"
        none = ", or 0, since VRAM has a slot for every expert" if idle else ""
        yield BrokenRule("expert slots", f"experts.{name}={value}; allowed: at least {least} ({why}){none}; set {name}={least}")


def expert_chunk_range(hardware: HardwareProfile, experts: Experts) -> tuple[int, int]:
    """Bytes of a copy of a part of an expert: at least the smallest measured one, at most the largest or a whole expert. Where an expert is
    smaller than every measured copy, a page at least."""
    whole, sizes = align_up(experts.expert_bytes), [size for size, _ in hardware.gpu.h2d.points] if hardware.gpu else [ALIGN, 2**30]
    return (min(sizes) if whole >= min(sizes) else ALIGN), max(whole, max(sizes))


def _dram_cache(hardware: HardwareProfile, model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    c = d.weights.dram
    low, high = c.cap_layers + LIMITS.headroom_min, c.cap_layers + LIMITS.headroom_max
    if c.cap_layers < 0:
        yield _range("weights.dram.cap_layers", c.cap_layers, 0)
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


def _transfers(d: Decisions) -> Iterator[BrokenRule]:
    ssd, h2d = d.weights.ssd, d.weights.h2d
    if ssd.block_bytes < ALIGN or ssd.block_bytes % ALIGN:
        yield BrokenRule(
            "block multiple of 4096",
            f"weights.ssd.block_bytes={ssd.block_bytes}; allowed: positive multiples of {ALIGN} (O_DIRECT); "
            f"set block_bytes={max(ALIGN, ssd.block_bytes // ALIGN * ALIGN)}",
        )
    if ssd.queue_depth < 1:
        yield _range("weights.ssd.queue_depth", ssd.queue_depth, 1)
    elif ssd.staging_bytes < ssd.block_bytes * ssd.queue_depth:
        need = ssd.block_bytes * ssd.queue_depth
        yield BrokenRule(
            "staging >= block x queue depth",
            f"weights.ssd.staging_bytes={ssd.staging_bytes}; allowed: at least {ssd.block_bytes} x {ssd.queue_depth} = {need}; "
            f"set staging_bytes={need}",
        )
    if h2d.chunk_bytes < 1:
        yield _range("weights.h2d.chunk_bytes", h2d.chunk_bytes, 1)
    if h2d.in_flight < 1:
        yield _range("weights.h2d.in_flight", h2d.in_flight, 1)


def _kv(hardware: HardwareProfile, model: ModelSpec, workload: Workload, d: Decisions) -> Iterator[BrokenRule]:
    kv = d.kv
    if kv.page_tokens not in LIMITS.page_tokens:
        allowed = ", ".join(map(str, LIMITS.page_tokens))
        yield BrokenRule("KV page size", f"kv.page_tokens={kv.page_tokens}; allowed: {allowed}; set one of these")
        return
    if kv.ssd_pages and kv.page_tokens < LIMITS.ssd_page_tokens_min:
        yield BrokenRule(
            "KV page size on SSD",
            f"kv.page_tokens={kv.page_tokens} with kv.ssd_pages={kv.ssd_pages}; allowed: {LIMITS.ssd_page_tokens_min} or more when KV "
            f"spills to SSD; set page_tokens={LIMITS.ssd_page_tokens_min} or ssd_pages=0",
        )
    home = "vram_pages" if hardware.gpu else "dram_pages"
    for name in ("vram_pages", "dram_pages", "ssd_pages"):
        value = getattr(kv, name)
        if value < 0:
            yield _range(f"kv.{name}", value, 0)
        if value > 0 and name != home and (not workload.kv_spill or name == "vram_pages"):
            yield BrokenRule(
                "KV tier",
                f"kv.{name}={value}; allowed: 0, since KV lives in kv.{home}"
                + ("; set workload.kv_spill=true" if name != "vram_pages" else " without a GPU; set it to 0"),
            )
    a_layer = max(1, -(-kv.pages // model.layers))
    for tier in Tier:
        pages = kv.of(tier)
        if pages % a_layer:
            yield BrokenRule(
                "KV layer by layer",
                f"kv.{tier}_pages={pages} of {kv.pages} in {model.layers} layers; allowed: whole layers, multiples of {a_layer}; "
                f"set it to {-(-pages // a_layer) * a_layer}",
            )
    yield from _kv_reuse(hardware, model, d)
    need = model.layers * d.batch * pages_per_sequence(workload, kv.page_tokens)
    if kv.pages < need:
        yield BrokenRule(
            "KV pages for the workload",
            f"kv pages={kv.pages} of {kv.page_tokens} tokens; allowed: at least {need} for {model.layers} layers and batch {d.batch} of "
            f"{workload.max_tokens} tokens; raise kv.{home}",
        )


def _kv_reuse(hardware: HardwareProfile, model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    kv, reuse = d.kv, d.kv.reuse
    for name in ("vram_pages", "dram_pages", "ssd_bytes"):
        if getattr(reuse, name) < 0:
            yield _range(f"kv.reuse.{name}", getattr(reuse, name), 0)
    if reuse.vram_pages > 0 and hardware.gpu is None:
        yield _range("kv.reuse.vram_pages", reuse.vram_pages, 0, 0, " without a GPU")
    if kv.ssd_pages > 0 and max(reuse.vram_pages, reuse.dram_pages, reuse.ssd_bytes) > 0:
        yield BrokenRule(
            "no kept KV beside KV on the SSD",
            f"kv.ssd_pages={kv.ssd_pages} with kv.reuse.dram_pages={reuse.dram_pages}, vram_pages={reuse.vram_pages}, "
            f"ssd_bytes={reuse.ssd_bytes}; allowed: one of both; solve again with workload.kept_tokens=0",
        )
    if reuse.vram_pages > 0 and hardware.gpu is not None and kv.dram_pages > 0:
        yield _range("kv.reuse.vram_pages", reuse.vram_pages, 0, 0, f" with kv.dram_pages={kv.dram_pages}")
    if reuse.ssd_bytes <= 0:
        return
    layer = kv_page_bytes(model, kv.page_tokens)
    if kv.page_tokens < LIMITS.ssd_page_tokens_min or layer % ALIGN:
        least = (t for t in LIMITS.page_tokens if t >= LIMITS.ssd_page_tokens_min and not kv_page_bytes(model, t) % ALIGN)
        fit = next(least, None)
        yield BrokenRule(
            "kept KV page size on SSD",
            f"kv.page_tokens={kv.page_tokens} with kv.reuse.ssd_bytes={reuse.ssd_bytes} makes pages of {layer} bytes a layer; allowed: "
            f"multiples of {ALIGN} and {LIMITS.ssd_page_tokens_min} tokens or more; "
            + ("set ssd_bytes=0" if fit is None else f"set page_tokens={fit} or ssd_bytes=0"),
        )
    elif kept_file_pages(model, kv) < 1:
        yield BrokenRule(
            "kept KV bytes on SSD",
            f"kv.reuse.ssd_bytes={reuse.ssd_bytes} holds no page; allowed: 0, or at least {kept_file_bytes(model, kv.page_tokens, 1)}; "
            "set one of these",
        )


def _capacities(hardware: HardwareProfile, model: ModelSpec, workload: Workload, d: Decisions) -> Iterator[BrokenRule]:
    tiers = (
        ("VRAM", "vram_bytes", hardware.vram_bytes if hardware.gpu else 0, vram_use(hardware, model, workload, d)),
        ("DRAM", "dram_bytes", hardware.dram_bytes, dram_use(hardware, model, workload, d)),
        ("SSD", "ssd_bytes", hardware.ssd_bytes, ssd_need(hardware, model, workload, d)),
    )
    for tier, key, capacity, use in tiers:
        need = sum(use.values())
        if need > capacity:
            items = ", ".join(f"{item} {show_bytes(n)}" for item, n in sorted(use.items(), key=lambda i: -i[1]) if n)
            yield BrokenRule(
                f"{tier} capacity",
                f"{tier}: the plan needs {need / GB:.3f} GB ({items}); allowed: hardware.{key}={capacity / GB:.3f} GB; "
                f"keep less there or solve again",
            )


def head_block_limit(model: ModelSpec) -> int:
    """What a row block of the LM head must fit: an FFN unit's slot. Where routed experts are units of their own, an FFN unit may be no more
    than a router, and a block as large as the attention unit passes."""
    return max(model.attn_max, model.ffn_max) if model.experts else model.ffn_max


def head_blocks(model: ModelSpec) -> int:
    """The fewest equal row blocks of the LM head within that limit."""
    limit = head_block_limit(model)
    blocks = -(-model.lm_head_bytes // limit)
    while blocks < model.vocab and head_block_bytes(model, blocks) > limit:
        blocks += 1
    return max(1, min(blocks, model.vocab))


def _range(key: str, value: int, low: int, high: int | None = None, why: str = "") -> BrokenRule:
    allowed = f"{low} or more" if high is None else f"{low} to {high}" if high > low else str(low)
    return BrokenRule(f"{key} range", f"{key}={value}; allowed: {allowed}{why}; set it so")
