"""What a plan decides, a row for each subject."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.bills.reuse import held, kept_set
from penstock.planner.contract.decided.decisions import ResidentForms, Tier
from penstock.planner.contract.decided.declared import DECLARED, Declared
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.schedules import near_counts
from penstock.planner.contract.prices.stages import ssd_gbps
from penstock.planner.render.whereabouts import experts_in, layers_in

EXPERTS = "experts"
CACHE = "DRAM cache"
NOTHING = "none"
"""Of a choice among names."""


def decided(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(subject, what is decided, what else is, and what follows): each decision in the words that it is declared with. A subject of which
    there is nothing is left out, and so is the DRAM cache where no layer passes through it."""
    follows, idle = dict(_follows(plan)), () if plan.placement.dram_layers else (CACHE,)
    rows: dict[str, list[tuple[Declared, Any]]] = {}
    for one in DECLARED:
        value = one.of(plan.decisions)
        if one.how.row and one.how.row not in idle and value is not None and _is_open(plan, one):
            rows.setdefault(one.how.row, []).append((one, value))
    for row, values in rows.items():
        if any(value and value != NOTHING for _, value in values):
            first, aside = (
                [_text(one, value) for one, value in values if one.how.text and one.how.aside == back] for back in (False, True)
            )
            yield row, ", ".join(first), ", ".join([*aside, *follows.get(row, ())])
        if row == EXPERTS:
            yield from _kept_experts(plan)


def _is_open(plan: Plan, one: Declared) -> bool:
    """Whether ``one`` means something here, and could be something else: not without a card what is of cards, and no form of what is not
    coded."""
    if one.owner is ResidentForms and not any((plan.model.attn_coded, plan.model.ffn_coded)):
        return False
    return plan.hardware.gpu is not None or not one.how.card


def _text(one: Declared, value: Any) -> str:
    said = one.how.text.format(_binary(value) if one.field.endswith("_bytes") else value)
    return re.sub(r"\b1 (\w+)s\b", r"1 \1", said) if value == 1 else said


def _follows(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """Row -> facts that follow from what is decided."""
    d, layers = plan.decisions, plan.model.layers
    lie = layers_in(plan)
    in_vram = lie[Tier.vram].count
    counts = f"{in_vram} {{}}in VRAM, {lie[Tier.dram].count} in DRAM, {lie[Tier.ssd].count} from SSD"
    if plan.model.experts:
        nbytes = show_bytes(sum(lies.nbytes for lies in lie.values()))
        yield "policy", [f"layers without experts, {nbytes}: {counts.format('')}"]
    else:
        yield "policy", [counts.format(f"layer{'s' * (in_vram != 1)} ")]
    ring = {name: slots for name, (slots, _) in plan.placement.ring_classes.items()}
    if len(ring) > 1:
        yield "VRAM ring", [f"{ring['attn']} for attention, {ring['ffn']} for FFN"]
    if counts_near := near_counts(plan):
        yield "CPU", [f"a run tries {' or '.join(map(str, counts_near))} ffn too"]
    yield "SSD reads", [f"{ssd_gbps(plan.hardware, d.weights.ssd.block_bytes, d.weights.ssd.queue_depth):.3g} GB/s"]
    tiers = ", ".join(f"{d.kv.of(tier)} in {str(tier).upper()}" for tier in Tier if d.kv.of(tier))
    yield "KV", [f"{d.kv.pages // layers} a layer: {tiers}"]
    kept = kept_set(plan.workload, d.kv.page_tokens)
    yield "KV kept", [f"{sum(held(plan.model, d.kv, kept).values())} of {kept.pages} wanted pages"]
    if plan.model.experts:
        yield EXPERTS, [f"slots for {plan.model.experts.units} experts"]


def _kept_experts(plan: Plan) -> Iterator[tuple[str, str, str]]:
    experts, lie, p = plan.model.experts, experts_in(plan), plan.prediction
    if experts is None or not lie:
        return
    tiers = {Tier.vram: p.experts_missed_vram, Tier.dram: p.experts_missed_dram}
    if not plan.hardware.gpu:
        del tiers[Tier.vram]
    rest = lie[Tier.ssd]
    at_least = "at least " if all(lie[tier].count for tier in Tier) else ""
    yield "  kept", ", ".join(f"{lie[t].count} in {t.upper()}" for t in tiers), f"{at_least}{rest.count} on the SSD alone"
    yield "  bytes", ", ".join(show_bytes(lie[t].nbytes) for t in tiers), f"{at_least}{show_bytes(rest.nbytes)} on the SSD alone"
    missed = ", ".join(f"{share:.1%} in {t.upper()}" for t, share in tiers.items())
    yield "  misses", missed, "of the experts that a decode step visits"


def _binary(nbytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"
