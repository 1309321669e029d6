"""What a plan decides, a row for each subject."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.declared import DECLARED, Declared
from penstock.planner.contract.experts.expert_slots import kept_in_all
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.reuse import held, kept_set
from penstock.planner.contract.prices.stages import ssd_gbps

EXPERTS = "experts"


def decided(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(subject, what is decided, what else is, and what follows): each decision in the words that it is declared with. A subject of which
    there is nothing is left out."""
    follows = dict(_follows(plan))
    rows: dict[str, list[tuple[Declared, Any]]] = {}
    for one in DECLARED:
        value = one.of(plan.decisions)
        if one.how.row and value is not None and (plan.hardware.gpu or not one.how.card):
            rows.setdefault(one.how.row, []).append((one, value))
    for row, values in rows.items():
        if any(value for _, value in values):
            first, aside = ([_text(one, value) for one, value in values if one.how.aside == back] for back in (False, True))
            yield row, ", ".join(first), ", ".join([*aside, *follows.get(row, ())])
        if row == EXPERTS:
            yield from _kept_experts(plan)


def _text(one: Declared, value: Any) -> str:
    return one.how.text.format(_binary(value) if one.field.endswith("_bytes") else value)


def _follows(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Row -> facts that follow from what is decided."""
    d, placement = plan.decisions, plan.placement
    layers, through, from_ssd = plan.model.layers, len(placement.dram_layers), len(placement.ssd_layers)
    yield "policy", [f"{layers - through} layers in VRAM, {through - from_ssd} in DRAM, {from_ssd} from SSD"]
    yield "SSD reads", [f"{ssd_gbps(plan.hardware, d.weights.ssd.block_bytes, d.weights.ssd.queue_depth):.3g} GB/s"]
    tiers = ", ".join(f"{d.kv.of(tier)} in {str(tier).upper()}" for tier in Tier if d.kv.of(tier))
    yield "KV", [f"{d.kv.pages // layers} a layer: {tiers}"]
    kept = kept_set(plan.workload, d.kv.page_tokens)
    yield "KV kept", [f"{sum(held(plan.model, d.kv, kept).values())} of {kept.pages} wanted pages"]
    if plan.model.experts:
        yield EXPERTS, [f"slots for {plan.model.experts.units} experts"]


def _kept_experts(plan: Plan) -> Iterator[tuple[str, str, str]]:
    slots, experts, p = plan.decisions.experts, plan.model.experts, plan.prediction
    if slots is None or experts is None:
        return
    rows = [("DRAM", slots.dram_slots, p.experts_missed_dram)]
    if plan.hardware.gpu:
        rows.insert(0, ("VRAM", slots.vram_slots, p.experts_missed_vram))
    kept = ", ".join(f"{kept_in_all(experts, n)} in {tier}" for tier, n, _ in rows)
    yield "  kept", kept, f"decode misses {', '.join(f'{share:.1%} in {tier}' for tier, _, share in rows)}"


def _binary(nbytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"
