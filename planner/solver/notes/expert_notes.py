"""What a plan says of its routed experts: where its hits come from, and what prediction can gain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Decisions, ExpertSlots, MissedExperts
from penstock.planner.contract.experts.expert_hits import default_source
from penstock.planner.contract.experts.expert_misses import visit
from penstock.planner.contract.experts.expert_slots import kept_in_all
from penstock.planner.contract.experts.policies.native import unbuilt
from penstock.planner.contract.given.model import Experts
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.missed_experts import no_split
from penstock.planner.solver.terms.foresight import DecodeStep


def expert_notes(plan: Plan, curve: str | None) -> Iterator[str]:
    """Sentences for the plan's notes: which curve of hits was used (``curve`` says where from, None is the default), and what prediction
    can gain. None for a dense model, or where memory keeps every expert next to the compute."""
    experts, d = plan.model.experts, plan.decisions
    if experts is None or d.experts is None or (d.experts.vram_slots if plan.hardware.gpu else d.experts.dram_slots) >= experts.units:
        return
    yield _hits(plan, d, experts, curve)
    yield _gain(plan, d, experts, d.experts)
    yield from _beside(plan, d.experts)
    if said := unbuilt(d.experts.policy):
        yield said


def _hits(plan: Plan, d: Decisions, experts: Experts, curve: str | None) -> str:
    assert d.experts is not None
    tier, slots = ("VRAM", d.experts.vram_slots) if plan.hardware.gpu else ("DRAM", d.experts.dram_slots)
    each = kept_in_all(experts, slots) / len(experts.layers)
    missed = plan.prediction.experts_missed_vram if plan.hardware.gpu else plan.prediction.experts_missed_dram
    source = f"({curve})" if curve else f"({default_source(d.experts.policy)}); moe.routings=FILE takes the model's own"
    return f"{tier} keeps {each:.3g} of {experts.count} experts a layer; predicted hits: {1 - missed:.1%} of those visited {source}"


def _beside(plan: Plan, slots: ExpertSlots) -> Iterator[str]:
    """Who computes what VRAM misses, and why. Nothing where there is no GPU, or no rate of a CPU beside it."""
    if plan.hardware.gpu is None or plan.hardware.host is None or not plan.prediction.experts_missed_vram:
        return
    first = plan.of_rank(0)
    if why := no_split(first.hardware, first.model):
        yield f"missed experts are copied: {why}"
        return
    took = {}
    for way in MissedExperts:
        other = replace(plan.decisions, experts=replace(slots, host=way))
        took[way] = show_seconds(predict(plan.hardware, plan.model, plan.workload, other).decode_s_per_token)
    what = (
        "the CPU computes a part of the missed experts where DRAM holds them"
        if slots.host is MissedExperts.split
        else "missed experts are copied"
    )
    yield f"{what}: a step takes {took[MissedExperts.split]} with the CPU and {took[MissedExperts.copied]} without it (moe.host)"


def _gain(plan: Plan, d: Decisions, experts: Experts, slots: ExpertSlots) -> str:
    step = DecodeStep(plan.hardware, plan.model, experts, plan.workload, d.batch)
    ahead = step.nearest(slots, d.weights.ssd)
    if (one := visit(experts, d.batch)).dense:
        return f"{d.batch} sequences visit {one.touched:.3g} of {experts.count} experts a layer: they pass in order, nothing is predicted"
    share = ahead.hidden_bytes / ahead.expert_bytes
    hidden = f"{share:.0%} of an expert" if share < 1 else f"{share:.3g} experts"
    way = "copied" if plan.hardware.gpu else "read"
    text = (
        f"an expert of {show_bytes(ahead.expert_bytes)} is {way} in {show_seconds(ahead.fetch_s)}; while a layer computes "
        f"({show_seconds(ahead.layer_s)}) {show_bytes(ahead.hidden_bytes)} can be {way} ({hidden})"
    )
    if slots.prefetch and experts.foreseen:
        return f"{text}; routers asked beforehand name {experts.foreseen:.0%} of those missed a layer ahead, and some of further layers"
    if slots.prefetch:
        reading = ""
        if plan.hardware.gpu and slots.dram_slots < experts.units:
            read_s = step.reading(d.weights.ssd, slots.chunk_bytes).fetch_s
            reading = f", {slots.read_ahead or 'none'} from the SSD, where each takes {show_seconds(read_s)}"
        many = "is" if slots.prefetch == 1 else "are"
        return f"{text}: {slots.prefetch} of the coming layer {many} fetched ahead{reading}"
    if ahead.pays and slots.host is MissedExperts.split:
        return f"{text}: nothing is fetched ahead, since the CPU computes a part of what is missed (moe.prefetch)"
    if ahead.pays:
        return f"{text}: nothing is fetched ahead, since moe.prefetch=0"
    return f"{text}, less than a piece of {show_bytes(ahead.piece_bytes)}: prediction cannot pay, nothing is fetched ahead"
