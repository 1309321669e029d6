"""What a solved program says: its variables' values as the decisions of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import pulp

from penstock.planner.contract.decided.decisions import (
    CachePolicy,
    Decisions,
    DramWeights,
    ExpertSlots,
    H2dCopies,
    KvPages,
    KvReuse,
    ResidentUnits,
    SsdReads,
    Tier,
    VramWeights,
    WeightDecisions,
)
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.prices.on_cpu import most_host_rows
from penstock.planner.contract.prices.sizes import kept_file_bytes
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.solver.terms.foresight import DecodeStep
from penstock.planner.solver.terms.formulation import Formulation
from penstock.planner.solver.terms.menu import MENUS

T = TypeVar("T")


def decisions_of(program: Formulation) -> Decisions:
    """``program`` was minimised. What it leaves open, such as the prefetch distance, follows from what it decided."""
    p, force = program.problem, program.problem.force
    gpu = program.gpu is not None
    ssd, chunk = _taken(program.ssd_bits, program.ssd_choices), _taken(program.chunk_bits, program.chunk_choices)
    ring = program.ring.choice
    distance = max(0, ring.slots - LIMITS.ring_margin) if force.vram_prefetch_distance is None else force.vram_prefetch_distance
    residents = ResidentUnits(_count(program.attn), _count(program.ffn), _count(program.head))
    page = program.page
    pages = {tier: round(pulp.value(layers)) * page.pages for tier, layers in program.kv.layers.items()}
    weights = WeightDecisions(
        policy=p.policy,
        embedding=Tier.vram if _count(program.embed_in_vram) else Tier.dram,
        head_blocks=program.head_blocks,
        vram=VramWeights(residents, ring.slots, distance if gpu else 0, ring.ffn_slots),
        dram=_dram_counts(program),
        ssd=SsdReads(ssd.block_bytes, ssd.queue_depth, ssd.staging_bytes),
        h2d=H2dCopies(chunk.chunk_bytes, MENUS.in_flight if force.in_flight is None else force.in_flight),
        forms=p.forms,
        host=_host(program),
    )
    on_host, passes = round(pulp.value(program.attention.count)), _taken(program.pass_bits, program.pass_choices)
    return Decisions(
        weights=weights,
        kv=KvPages(page.page_tokens, pages[Tier.vram], pages[Tier.dram], pages[Tier.ssd], _kept(program), on_host),
        experts=_experts(program, weights.ssd),
        batch=p.batch,
        prefill_chunk_tokens=passes.chunk_tokens,
        prefill_part_tokens=passes.part_tokens,
        recorded_prompt_tokens=passes.recorded_tokens,
    )


def _host(program: Formulation) -> HostUnits:
    p = program.problem
    ffn, head = (round(pulp.value(program.host.decided[kind])) for kind in (UnitKind.ffn, UnitKind.head))
    host = HostUnits(ffn, p.force.host_rows or 0, head, p.force.host_near or 0)
    if not host.count or p.force.host_rows is not None:
        return host
    return replace(host, rows=most_host_rows(p.hardware, p.model, p.batch, host))


def _experts(program: Formulation, ssd: SsdReads) -> ExpertSlots | None:
    """Slots from the program; what moves them follows from the link."""
    p, experts = program.problem, program.problem.model.experts
    if experts is None:
        return None
    slots = ExpertSlots(*(round(pulp.value(program.experts.slots[tier])) for tier in (Tier.vram, Tier.dram)))
    slots = p.force.apply_to_experts(slots)
    if p.hardware.gpu:
        slots = replace(slots, chunk_bytes=program.experts.chunk_bytes, host=program.experts.host)
    step, gpu = DecodeStep(p.hardware, p.model, experts, p.workload, p.batch), p.hardware.gpu is not None
    if p.force.expert_prefetch is None:
        slots = replace(slots, prefetch=step.fetched_ahead(slots, ssd))
    if p.force.expert_read_ahead is None and gpu and slots.prefetch:
        slots = replace(slots, read_ahead=step.worth_fetching(slots.dram_slots, step.reading(ssd, slots.chunk_bytes)))
    return slots


def _kept(program: Formulation) -> KvReuse:
    kept = program.kept
    vram, dram, files = (round(pulp.value(n)) for n in (kept.tiers[Tier.vram], kept.tiers[Tier.dram], kept.on_ssd))
    return KvReuse(vram, dram, kept_file_bytes(program.problem.model, program.page.page_tokens, files))


def _taken(bits: Sequence[pulp.LpVariable], choices: Sequence[T]) -> T:
    return next(choice for bit, choice in zip(bits, choices, strict=True) if bit.value() > 0.5)


def _count(variable: pulp.LpVariable) -> int:
    return round(variable.value())


def _dram_counts(program: Formulation) -> DramWeights:
    """Cap, HWM and distance where the program leaves a choice: the largest cap that changes nothing; the least headroom if all layers stay
    cached; a window as long as the headroom can hold.

    Pinned layers are spread evenly. So ``hwm`` layers ahead always hold as many streamed layers as there are slots for them. A rolling
    window is one layer shorter, so that the window and the layer that computes fit together.
    """
    force, policy = program.problem.force, program.problem.policy
    through = round(pulp.value(program.through_dram))
    cap = _count(program.cap)
    all_cached = _count(program.all_cached) == 1
    caps = range(through, -1, -1) if all_cached and force.cap_layers is None else [cap]
    least = LIMITS.headroom_min if all_cached else _count(program.headroom)
    for cap in caps:
        for hwm in range(cap + least, cap + LIMITS.headroom_max + 1):
            farthest = hwm if policy is CachePolicy.pinned else hwm - 1
            distance = farthest if force.prefetch_distance is None else force.prefetch_distance
            holds_all = hwm >= through or not all_cached
            if force.hwm_layers in (None, hwm) and cap <= distance <= hwm and holds_all:
                return DramWeights(cap, hwm, distance, cap if policy is CachePolicy.pinned else 0)
    raise RuntimeError("the program's DRAM cache counts fit no high-water mark")
