"""Where a plan's layers and routed experts lie: how many in each tier, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.experts.expert_misses import misses
from penstock.planner.contract.experts.expert_slots import kept_in_all
from penstock.planner.contract.plan.plan import Plan


@dataclass(frozen=True)
class Lies:
    """What lies in one tier."""

    count: int
    nbytes: int


def beside_card(plan: Plan) -> tuple[Unit, ...]:
    """Units that the CPU computes in the workload's decode steps; none without a GPU."""
    return plan.placement.host_units if plan.decisions.weights.host.compute(plan.decisions.batch) else ()


def experts_beside(plan: Plan) -> float:
    """Routed experts that the CPU computes in a decode step beside the card, on average."""
    experts, gpu = plan.decisions.experts, plan.hardware.gpu is not None
    if plan.model.experts is None or experts is None or not gpu:
        return 0.0
    shared = 1 - Moved.of(plan.hardware, plan.model, plan.decisions).missed.copied
    return shared * misses(plan.model, experts, plan.decisions.batch, gpu).from_dram


def beside_bytes(plan: Plan) -> int:
    """What the CPU multiplies by in a decode step beside the card: units, and missed experts on average."""
    nbytes = plan.model.experts.expert_bytes if plan.model.experts else 0
    return sum(map(plan.placement.unit_bytes, beside_card(plan))) + round(experts_beside(plan) * nbytes)


def computed_by(plan: Plan) -> dict[str, int]:
    """Who computes with the units of a decode step, and where from: bytes of each, routed experts apart."""
    placement, gpu, host = plan.placement, plan.hardware.gpu is not None, frozenset(beside_card(plan))
    found = dict.fromkeys(("card, from VRAM", "card, copied to it", "CPU, where they lie"), 0)
    for unit, tier in placement.units:
        who = "CPU, where they lie" if unit in host or not gpu else "card, from VRAM" if tier is Tier.vram else "card, copied to it"
        found[who] += placement.unit_bytes(unit)
    return {who: nbytes for who, nbytes in found.items() if nbytes}


def layers_in(plan: Plan) -> dict[Tier, Lies]:
    """Layers without their routed experts. One with a unit on the SSD counts there, else one with a unit in DRAM counts there. Bytes are
    those of units."""
    counts, nbytes = dict.fromkeys(Tier, 0), dict.fromkeys(Tier, 0)
    for one in plan.each_rank:
        placement = one.placement
        through, from_ssd = len(placement.dram_layers), len(placement.ssd_layers)
        for tier, count in ((Tier.vram, one.model.layers - through), (Tier.dram, through - from_ssd), (Tier.ssd, from_ssd)):
            counts[tier] += count
        for unit, tier in placement.units:
            if unit.kind != "head":
                nbytes[tier] += placement.unit_bytes(unit)
    return {tier: Lies(counts[tier], nbytes[tier]) for tier in Tier}


def experts_in(plan: Plan) -> dict[Tier, Lies]:
    """Routed experts that each memory keeps; under ``ssd`` those that none keeps, at the least: an expert may lie in both memories. Nothing
    for a dense model."""
    found = dict[Tier, Lies]()
    for one in plan.each_rank:
        experts, slots = one.model.experts, one.decisions.experts
        if experts is None or slots is None:
            continue
        in_vram, in_dram = (kept_in_all(experts, n) for n in (slots.vram_slots, slots.dram_slots))
        counts = {Tier.vram: in_vram, Tier.dram: in_dram, Tier.ssd: max(0, experts.units - in_vram - in_dram)}
        for tier, count in counts.items():
            before = found.get(tier, Lies(0, 0))
            found[tier] = Lies(before.count + count, before.nbytes + count * experts.expert_bytes)
    return found
