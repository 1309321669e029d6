"""Experts that VRAM misses in a decode step: which the CPU can compute, how link and CPU share them, and what one costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import ExpertSlots, MissedExperts
from penstock.planner.contract.experts.expert_misses import Visit, visit
from penstock.planner.contract.experts.expert_slots import kept_in_all
from penstock.planner.contract.experts.host_split import HostSplit
from penstock.planner.contract.experts.shared_visits import NO_VISITS, NONE_CAME, SharedVisits, Unasked, missed_rows, shared_visits
from penstock.planner.contract.experts.visit_waits import mean_of
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile
from penstock.planner.contract.given.model import Experts, ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.prices.late_experts import ahead_of
from penstock.planner.contract.prices.launches import handed_issue_s
from penstock.planner.contract.prices.on_cpu import no_f16_rates
from penstock.planner.contract.prices.price import Price, Resource
from penstock.planner.contract.prices.price_table import passed
from penstock.planner.contract.prices.sizes import expert_vram_bytes
from penstock.planner.contract.prices.stages import between_experts_s, expert_copy_s, expert_step_s
from penstock.planner.contract.ranks.rank_chain import fetching_turns

GATED = frozenset(
    {"deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"}
)
"""Model types whose experts compute down(act(gate(x)) * up(x)) without biases, as transformers v5 has them."""
CLAMPED = "gpt_oss"
"""Has biases, and a gate of its own; as published its experts are coded."""


def no_split(hardware: HardwareProfile, model: ModelSpec) -> str:
    """Why the CPU can compute no expert beside the card; empty where it can."""
    if hardware.gpu is None:
        return "there is no GPU"
    if hardware.host is None:
        return "the CPU's products beside the GPU were not measured"
    if model.slices > 1:
        return "slices of experts are computed by their cards"
    if model.experts is None or model.model_type not in {*GATED, CLAMPED}:
        return "the CPU does not compute this model's experts"
    if no_f16_rates(hardware, model):
        return "the hardware profile has no rates of the CPU with F16 (`planner probe` measures them)"
    unit = model.of_kind(UnitKind.expert)[0]
    if model.model_type == CLAMPED and not unit.is_coded:
        return "its experts lie transposed"
    timed = hardware.host.computing(model.compute_dtype).most_rows(unit.format)
    return "" if timed else f"no rate of the CPU with {unit.format.name} is known (`planner probe` measures it)"


def host_split(hardware: HardwareProfile, model: ModelSpec, slots: ExpertSlots | None, batch: int) -> HostSplit | None:
    """How a step of ``batch`` rows shares missed experts, as ``slots`` decide; None where all are copied. Of several ranks the threads
    sleep while others have the cores, and wake up for each visit: that takes as long as for the CPU's attention."""
    if slots is None or slots.host is MissedExperts.copied or no_split(hardware, model):
        return None
    host, gpu, experts = hardware.host, hardware.gpu, model.experts
    assert host is not None and gpu is not None and experts is not None
    stored, host = model.of_kind(UnitKind.expert)[0].format, host.computing(model.compute_dtype)
    curve = host.curve(stored)
    assert curve is not None, "no_split says so"
    seconds = tuple(experts.expert_bytes / curve.at(rows) / GB for rows in range(1, min(batch, host.most_rows(stored)) + 1))
    copy_s, asked_s = expert_copy_s(gpu, experts, slots.chunk_bytes), handed_issue_s(hardware)
    hop_s = host.hop_s if model.dealt is None else max(host.hop_s, host.attention_hop_s)
    return HostSplit(copy_s, seconds, hop_s, host.beside_h2d, host.h2d_beside, asked_s)


@dataclass(frozen=True)
class Missed:
    """One of a decode step's experts that VRAM misses and DRAM holds."""

    bill: Price
    visits: SharedVisits = NO_VISITS
    """Such as miss 0, 1, 2 ... of them, if nothing goes on beside."""
    all_asked: SharedVisits = NO_VISITS
    """The same of visits that use nearly all experts of a layer: some have come, or come, when the router speaks."""
    copied: float = 1.0
    """The share of them that the link brings."""
    odds: float | None = None
    """Of a layer's experts that a step uses, the share that such a plan misses as ``copied`` is counted for; None where all are copied."""
    link_last: float = 1.0
    """Of a step's visits, the share that waits for the link, not for the CPU."""

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, slots: ExpertSlots, batch: int, kv_bytes: int, copied: Price) -> Missed:
        """Where ``copied`` is the price of a copy. Shared with the CPU, all layers miss as many on average as those of a plan that streams
        nothing but experts and has ``kv_bytes`` of KV in VRAM, each expert by itself: so the price is the same for all decisions of one
        program. The card is spared what the CPU computes with."""
        split, experts, gpu = host_split(hardware, model, slots, batch), model.experts, hardware.gpu
        copy_s = copied.of(Resource.h2d)
        if experts is None or gpu is None:
            return cls(copied)
        one = visit(experts, batch)
        visited = max(1, round(one.touched))
        if split is None:
            came = ahead_of(hardware, model) * one.touched / experts.count
            return cls(copied, SharedVisits.copied(copy_s, visited), SharedVisits.copied(copy_s, visited, came))
        kept = kept_beside_layers(gpu, hardware.vram_bytes - kv_bytes, model, experts) / len(experts.layers)
        rows, odds = missed_rows(experts, batch, round(kept), len(split.host_s)), min(1.0, max(1e-6, one.missed(kept) / visited))
        unasked = _unasked(hardware, model, slots, batch, experts.count - kept)
        ways = shared_visits(split, rows, visited), shared_visits(split, rows, visited, unasked)

        def mean(few: Sequence[float], many: Sequence[float]) -> float:
            """Of a visit."""
            return (1 - one.all_asked) * mean_of(few, odds, one.even) + one.all_asked * mean_of(many, odds, one.even)

        def each(few: Sequence[float], many: Sequence[float]) -> float:
            """Of one missed expert."""
            return mean(few, many) / (odds * visited)

        on_host = each(*(way.taken for way in ways))
        host_s, link_s = each(*(way.host_s for way in ways)), each(*(way.link_s for way in ways))
        seconds = {
            Resource.h2d: link_s + host_s * (1 - split.link_beside) / split.host_beside,
            Resource.cpu: host_s,
            Resource.card: -on_host * expert_step_s(hardware, model, batch) * fetching_turns(model),
        }
        bill, link_last = Price(seconds, alongside=host_s) + passed(hardware, experts.expert_bytes), mean(*(way.link_last for way in ways))
        return cls(bill, *ways, 1 - on_host, odds, link_last)


def _unasked(hardware: HardwareProfile, model: ModelSpec, slots: ExpertSlots, batch: int, missing: float) -> Unasked:
    """What comes unasked for a layer of which ``missing`` experts are not kept: as many as the link brings between two layers' experts, and
    one that is on its way. It begins when the layer before has left it a slot. Of one that is not used those pieces go on that the link was
    given, but for half a piece."""
    gpu, experts = hardware.gpu, model.experts
    assert gpu is not None and experts is not None
    copy_s, beside_s = expert_copy_s(gpu, experts, slots.chunk_bytes), between_experts_s(hardware, model, batch)
    copied = min(int(ahead_of(hardware, model)), 1 + int(beside_s / copy_s), int(missing))
    left_s, pieces = max(0.0, copied * copy_s - beside_s), experts.pieces(slots.chunk_bytes)
    return Unasked(copied, missing, left_s, min(left_s, (slots.in_flight - 0.5) / pieces * copy_s)) if copied > 0 else NONE_CAME


def kept_beside_layers(gpu: Gpu, vram_bytes: int, model: ModelSpec, experts: Experts) -> int:
    """Experts of all layers that VRAM keeps beside all that is no expert, as far as there is room."""
    others = sum(model.attn_bytes) + sum(model.ffn_bytes) + model.lm_head_bytes + model.norm_bytes + gpu.context_bytes
    return kept_in_all(experts, max(0, vram_bytes - others) // expert_vram_bytes(experts))


def missed_beside_layers(gpu: Gpu, vram_bytes: int, model: ModelSpec, experts: Experts, one: Visit) -> float:
    """Experts of all layers that such a VRAM misses."""
    return len(experts.layers) * one.missed(kept_beside_layers(gpu, vram_bytes, model, experts) / len(experts.layers))
