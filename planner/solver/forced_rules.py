"""What is asked of the program, checked before anything is solved: workloads that mean nothing, and forced values that break a rule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import (
    CachePolicy,
    Decisions,
    DramWeights,
    ExpertSlots,
    H2dCopies,
    KvPages,
    ResidentUnits,
    SsdReads,
    Tier,
    VramWeights,
    WeightDecisions,
)
from penstock.planner.contract.decided.declared import FORCED
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.decided.placement import head_blocks
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Objective, Workload
from penstock.planner.contract.prices.sizes import pool_pages
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.contract.rules.limits import LIMITS
from penstock.planner.contract.rules.setting import Setting, broken
from penstock.planner.solver.terms.menu import MENUS, ssd_menu


def check_request(hardware: HardwareProfile, model: ModelSpec, workload: Workload, force: Force) -> None:
    """Raise ``UserError`` for a workload that means nothing or a forced value that breaks a rule by itself, naming both."""
    if workload.prompt_tokens < 1 or workload.new_tokens < 1 or workload.requests < 1 or workload.batch < 0:
        raise UserError(
            f"workload.prompt_tokens={workload.prompt_tokens}, new_tokens={workload.new_tokens}, requests={workload.requests}, "
            f"batch={workload.batch}; allowed: 1 or more each (batch 0 under objective=throughput); raise the one that is less"
        )
    if workload.batch == 0 and workload.objective is not Objective.throughput and not workload.is_served:
        raise UserError(
            f"workload.batch=0 with workload.objective={workload.objective}; allowed: 0 lets the program choose under throughput only; "
            "set workload.batch=1 or workload.objective=throughput"
        )
    for name, value in force.given.items():
        one = FORCED[name]
        if not callable(one.how.allowed) and value not in one.how.allowed:
            raise UserError(broken(one.place, value, one.how.allowed).forced(f"{one.key}={value}"))
    of_experts = [name for name in force.given if FORCED[name].owner is ExpertSlots]
    if model.experts is None and of_experts:
        keys = ", ".join(f"{Force.key(name)}={force.given[name]}" for name in of_experts)
        raise UserError(f"{keys}: {model.name} has no routed experts; drop it, or choose a MoE model")
    base = _neutral(hardware, model, workload, force)
    roomy = replace(hardware, vram_bytes=2**62, dram_bytes=2**62, ssd_bytes=2**62)
    for rule in broken_rules(roomy, model, workload, force.apply(base, model.layers)):
        keys = force.culprits(partial(_breaks, rule.name, roomy, model, workload))
        raise UserError(rule.forced(keys))


def _breaks(name: str, hardware: HardwareProfile, model: ModelSpec, workload: Workload, force: Force) -> bool:
    decisions = force.apply(_neutral(hardware, model, workload, force), model.layers)
    return any(rule.name == name for rule in broken_rules(hardware, model, workload, decisions))


def _neutral(hardware: HardwareProfile, model: ModelSpec, workload: Workload, force: Force) -> Decisions:
    """Decisions that break no rule but capacities, as near to the forced values as the rules let them be."""
    gpu = hardware.gpu is not None
    low, high = LIMITS.headroom_min, LIMITS.headroom_max
    stay = model.layers if gpu and force.recorded_prompt_tokens else 0
    through = model.layers - max(stay, min(force.resident_attn or 0, force.resident_ffn or 0))
    wishes = [force.prefetch_distance, None if force.hwm_layers is None else force.hwm_layers - low, through]
    cap = force.cap_layers if force.cap_layers is not None else max(0, min(wish for wish in wishes if wish is not None))
    hwm = max(cap + low, min(cap + high, force.prefetch_distance or 0))
    ssd = ssd_menu(hardware, model, force)[0]
    distance, ffn = force.vram_prefetch_distance or 0, force.vram_ffn_slots or 0
    slots = max(MENUS.ring_slots[0], distance + LIMITS.ring_margin, ffn + 1) if gpu else 0
    page = force.page_tokens if force.page_tokens in LIMITS.page_tokens else LIMITS.page_tokens[0]
    batch = workload.batch or 1
    pages = model.layers * pool_pages(workload, batch, page)
    blocks = head_blocks(model) if gpu else 1
    weights = WeightDecisions(
        CachePolicy.pinned,
        Tier.dram,
        blocks,
        VramWeights(ResidentUnits(stay, stay, blocks if stay else 0), slots, max(0, slots - LIMITS.ring_margin)),
        DramWeights(cap, hwm, hwm, cap),
        SsdReads(ssd.block_bytes, ssd.queue_depth, ssd.staging_bytes),
        H2dCopies(2**20, MENUS.in_flight),
    )
    attended = bool(gpu and force.host_attention and workload.kv_spill)
    kv = KvPages(page, 0 if attended or not gpu else pages, pages if attended or not gpu else 0, 0)
    made = Decisions(weights, kv, None, batch, workload.prompt_tokens)
    if model.experts is None:
        return made
    slots = fewest_slots(model.experts)
    in_vram = model.experts.units if force.expert_dram_slots == 0 else slots
    chunk_bytes = Setting(hardware, model, made).expert_chunk.least
    return replace(made, experts=ExpertSlots(in_vram if gpu else 0, slots, chunk_bytes=int(chunk_bytes)))
