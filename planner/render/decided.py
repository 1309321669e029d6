"""What a plan decides, a row for each subject."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.decided.decisions import ExpertSlots, Tier
from penstock.planner.contract.experts.expert_slots import kept_in_all
from penstock.planner.contract.given.model import Experts
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.reuse import held, kept_set
from penstock.planner.contract.prices.stages import ssd_gbps


def decided(plan: Plan) -> Iterator[tuple[str, str, str]]:
    d, layers = plan.decisions, plan.model.layers
    w, placement, gpu = d.weights, plan.placement, plan.hardware.gpu is not None
    through, from_ssd = len(placement.dram_layers), len(placement.ssd_layers)
    yield "policy", str(w.policy), f"{layers - through} layers in VRAM, {through - from_ssd} in DRAM, {from_ssd} from SSD"
    if gpu:
        resident = w.vram.resident_units
        head = f"{resident.head} of {w.head_blocks} LM-head blocks; embedding in {w.embedding}"
        yield "VRAM", f"{resident.attn} attn + {resident.ffn} ffn kept", head
        yield "VRAM ring", f"{w.vram.slots} slots", f"{w.vram.prefetch_distance} units ahead"
    cache = w.dram
    ahead = f"{cache.prefetch_distance} layers ahead, {cache.resident_layers} kept"
    yield "DRAM cache", f"cap {cache.cap_layers}, HWM {cache.hwm_layers}", ahead
    ssd, rate = w.ssd, ssd_gbps(plan.hardware, w.ssd.block_bytes, w.ssd.queue_depth)
    yield "SSD reads", f"{_binary(ssd.block_bytes)} x {ssd.queue_depth}", f"{rate:.3g} GB/s, staging {_binary(ssd.staging_bytes)}"
    if gpu:
        yield "H2D copies", f"{_binary(w.h2d.chunk_bytes)} x {w.h2d.in_flight}", ""
    tiers = ", ".join(f"{d.kv.of(tier)} in {str(tier).upper()}" for tier in Tier if d.kv.of(tier))
    yield "KV", f"pages of {d.kv.page_tokens} tokens", f"{d.kv.pages // plan.model.layers} a layer: {tiers}"
    if plan.workload.kept_tokens:
        kept = kept_set(plan.workload, d.kv.page_tokens)
        pages = ", ".join(f"{n} {tier.upper()}" for tier, n in held(plan.model, d.kv, kept).items() if n) or "none"
        files = f"; files {show_bytes(d.kv.reuse.ssd_bytes)}" if d.kv.reuse.ssd_bytes else ""
        yield "KV kept", f"{kept.pages} pages", pages + files
    if d.experts and plan.model.experts:
        yield from _experts(plan, d.experts, plan.model.experts)
    yield "prefill", f"{d.prefill_chunk_tokens} tokens a pass", f"batch {d.batch}"


def _experts(plan: Plan, slots: ExpertSlots, experts: Experts) -> Iterator[tuple[str, str, str]]:
    gpu, p = plan.hardware.gpu is not None, plan.predicted
    rows = [("DRAM", slots.dram_slots, p.experts_missed_dram)]
    if gpu:
        rows.insert(0, ("VRAM", slots.vram_slots, p.experts_missed_vram))
    yield "experts", ", ".join(f"{n} in {tier}" for tier, n, _ in rows), f"slots, for {experts.units} experts; policy {slots.policy}"
    kept = ", ".join(f"{kept_in_all(experts, n)} in {tier}" for tier, n, _ in rows)
    yield "  kept", kept, f"decode misses {', '.join(f'{share:.1%} in {tier}' for tier, _, share in rows)}"
    if gpu:
        ahead = f"{slots.prefetch} ahead, {slots.read_ahead} from the SSD, {slots.in_flight} in flight"
        yield "  copies", f"{_binary(slots.chunk_bytes)} chunks", ahead if slots.prefetch else "none ahead of the router"


def _binary(nbytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"
