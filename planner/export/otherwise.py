"""A decode step as another engine makes it: what moves over which link, what computes, and what waits for what.

The planner predicts where only decisions change. No plan expresses copies that do not overlap, or pageable memory. These are composed here
of the same rates, and of the pause of each pass that runs found. An engine's own overheads are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.planner.common.measures import GB, show_bytes
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.placement import split
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Place, Price, Resource
from penstock.planner.contract.prices.price_table import PriceTable, passed
from penstock.planner.contract.prices.sizes import kv_page_bytes
from penstock.planner.contract.rules.broken import broken_rules
from penstock.planner.export.exported import Lost
from penstock.planner.render.whereabouts import beside_card


@dataclass(frozen=True)
class Step:
    """What one decode step costs. ``routed_s`` is what a step takes at least since a layer's experts are known late, ``pass_s`` what it
    takes beyond every resource."""

    batch: int
    bill: Price
    routed_s: float
    pass_s: float
    overlapped: bool = True

    @property
    def seconds(self) -> float:
        """Resources work side by side or one after the other; the bus works while they do."""
        in_turn = sum(self.bill.without(Resource.dram).seconds.values())
        return max(self.routed_s, self.bill.lasts() if self.overlapped else in_turn) + self.pass_s

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.seconds

    def moving(self, weights: Price) -> Step:
        """The same with other bytes on their way, in what order ever."""
        return replace(self, bill=self.bill.without(Resource.ssd, Resource.h2d, Resource.dram) + weights)

    def moving_more(self, weights: Price) -> Step:
        return replace(self, bill=self.bill + weights)


def planned(plan: Plan) -> Step:
    """The step that ``plan`` predicts."""
    p, pass_s = plan.prediction, plan.passes_s["decode"]
    bill = Price({resource: p.decode_stages[resource] for resource in Resource})
    return Step(plan.decisions.batch, bill, p.decode_s_per_token - pass_s if plan.model.experts else 0.0, pass_s)


def decided(plan: Plan, decisions: Decisions) -> Plan | None:
    """``plan`` with other ``decisions``, predicted; None where they break a rule."""
    if broken_rules(plan.hardware, plan.model, plan.workload, decisions):
        return None
    return replace(plan, decisions=decisions, prediction=predict(plan.hardware, plan.model, plan.workload, decisions))


def copied(plan: Plan) -> Plan:
    """``plan`` for an engine that computes all of a step on the card: what the CPU computes is copied, too."""
    weights = plan.decisions.weights
    kv = replace(plan.decisions.kv, host_layers=0)
    decisions = replace(plan.decisions, weights=replace(weights, host=HostUnits()), kv=kv)
    return replace(plan, decisions=decisions, prediction=predict(plan.hardware, plan.model, plan.workload, decisions))


def computed_beside(plan: Plan) -> Iterator[Lost]:
    """What such an engine loses of the CPU's units; what else it loses comes on top of that."""
    kinds = Counter(unit.kind for unit in beside_card(plan))
    if what := [f"{kinds[kind]} {words}" for kind, words in (("ffn", "FFN units"), ("head", "blocks of the LM head")) if kinds[kind]]:
        lost = f"{' and '.join(what)} that the CPU computes"
        yield Lost(lost, "copied to the card like the others", planned(copied(plan)).tokens_per_s)


def moved_price(plan: Plan, read_bytes: float, copied_bytes: float) -> Price:
    """Reading with the plan's blocks and depth, and copying at the best rate of page-locked copies; no copies without a GPU."""
    price, gpu = PriceTable.of(plan.hardware, plan.decisions).brought(read_bytes, Tier.ssd, Place.host), plan.hardware.gpu
    return price + Price({Resource.h2d: copied_bytes / gpu.h2d.peak / GB}) + passed(plan.hardware, copied_bytes) if gpu else price


def expert_tiers(plan: Plan) -> dict[int, Tier]:
    """MoE layer -> where all its experts lie when they lie still, layer by layer, in the bytes that the plan's slots take. Those in VRAM
    need not be in DRAM, too. Spread evenly."""
    experts, slots = plan.model.experts, plan.decisions.experts
    if experts is None or slots is None:
        return {}
    in_vram, others = split(experts.layers, min(slots.vram_slots // experts.count, len(experts.layers)))
    in_dram, _ = split(others, min(slots.dram_slots // experts.count, len(others)))
    return {i: Tier.vram if i in in_vram else Tier.dram if i in in_dram else Tier.ssd for i in experts.layers}


@dataclass(frozen=True)
class StillExperts:
    """Bytes of a decode step's experts when they lie still (``expert_tiers``), by whole layers."""

    outside_vram: int
    """What is not in VRAM, the SSD's included."""
    on_ssd: int


def still_experts(plan: Plan) -> StillExperts:
    """What a step moves of experts that lie outside VRAM: all of a layer, since they are one tensor; none for a dense model."""
    experts = plan.model.experts
    if experts is None:
        return StillExperts(0, 0)
    tiers = list(expert_tiers(plan).values())
    each = experts.count * experts.expert_bytes
    return StillExperts(each * sum(tier is not Tier.vram for tier in tiers), each * sum(tier is Tier.ssd for tier in tiers))


def kv_too_large(plan: Plan) -> str:
    """Why an engine that keeps the KV of running sequences beside the compute cannot run all of ``plan``'s at once; empty where it can."""
    kv, gpu = plan.decisions.kv, plan.hardware.gpu is not None
    outside = (kv.dram_pages if gpu else 0) + kv.ssd_pages
    if not outside:
        return ""
    nbytes = outside * kv_page_bytes(plan.model, kv.page_tokens)
    return f"{show_bytes(nbytes)} of KV lie outside {'VRAM' if gpu else 'DRAM'}, where it has all; solve with a smaller batch for it."


def head_outside_bytes(plan: Plan) -> int:
    """Bytes of the LM head that is copied each step where it cannot be cut into blocks: none when all of it is resident."""
    return 0 if Tier.dram not in plan.placement.head else plan.model.lm_head_bytes


def layers_outside_bytes(plan: Plan) -> int:
    """Bytes of the decoder layers' weights that do not stay in VRAM, experts as whole layers."""
    placement, experts = plan.placement, plan.model.experts
    units = sum(placement.unit_bytes(unit) for unit, tier in placement.units if tier is not Tier.vram and unit.kind != "head")
    routed = sum(tier is not Tier.vram for tier in expert_tiers(plan).values()) * experts.count * experts.expert_bytes if experts else 0
    return units + routed


def tables_outside_bytes(plan: Plan) -> int:
    """The same of the LM head, in one piece, and of the embedding table. Where they are tied, VRAM has them if it has either."""
    head, far = head_outside_bytes(plan), plan.decisions.weights.embedding is Tier.dram
    if plan.model.tied:
        return head if far else 0
    return head + (plan.model.embed_bytes if far else 0)


def weights_outside_bytes(plan: Plan) -> int:
    """Bytes of all weights that do not stay in VRAM."""
    return layers_outside_bytes(plan) + tables_outside_bytes(plan)


def head_streamed_bytes(plan: Plan) -> int:
    """Bytes of the LM head's blocks that the plan copies each step."""
    return sum(tier is Tier.dram for tier in plan.placement.head) * plan.placement.head_block_bytes if plan.hardware.gpu else 0
