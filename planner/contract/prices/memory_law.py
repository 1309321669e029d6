"""What takes bytes of each tier, item by item: the memory law, of plans as of the integer program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.planner.common.measures import align_up
from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.decided.placement import place
from penstock.planner.contract.decided.recording import can_record, records_whole, staged_bytes
from penstock.planner.contract.decided.speculating import Drafter
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.launches import is_recorded
from penstock.planner.contract.prices.price import Amount
from penstock.planner.contract.prices.sizes import (
    OVERHEADS,
    activation_bytes,
    card_activation_bytes,
    dram_slot_bytes,
    dram_workspace_bytes,
    expert_dram_bytes,
    expert_vram_bytes,
    kept_page_bytes,
    kv_arena_slots,
    kv_layer_bytes,
    kv_page_bytes,
    kv_ring_slots,
    kv_staging_slots,
    recorded_bytes,
    recorded_prompt_bytes,
    ring_bytes,
    scratch_bytes,
    unit_vram_bytes,
)
from penstock.planner.contract.speculation.resident_drafter import resident, states_bytes
from penstock.planner.contract.speculation.verify_shapes import VerifyShape, verify_shapes

ONCE_A_PROCESS = frozenset({"context", "workspace"})
"""Items of VRAM that a process has once, whatever models it runs."""
LEFT_ALONE = frozenset({"guard", "reserve"})
"""Items that a capacity must leave free: rules count them, a prediction of used bytes does not."""


@dataclass(frozen=True)
class Held:
    """What takes bytes: whole numbers for a plan, expressions of its variables in the integer program. Bytes where nothing else is said."""

    residents: Amount = 0
    """Units of weights that stay in VRAM."""
    ring: Amount = 0
    embedding: Amount = 0
    """In VRAM."""
    layer_cache: Amount = 0
    staging: Amount = 0
    tables: Amount = 0
    """Embedding table and LM head, as far as DRAM has them."""
    expert_slots: Mapping[Tier, Amount] = field(default_factory=dict)
    """Slots."""
    kv: Mapping[Tier, Amount] = field(default_factory=dict)
    """Of running sequences, where it lies."""
    states: Amount = 0
    """What sequences keep beside KV, where the model computes."""
    kv_passing: Mapping[Tier, Amount] = field(default_factory=dict)
    """Slots of VRAM and DRAM that KV from farther tiers passes through."""
    kept_pages: Mapping[Tier, Amount] = field(default_factory=dict)
    """Pages of VRAM and DRAM for prompts to come, each of ``kept_page_bytes``."""
    kept_page_bytes: int = 0
    bounces: Amount = 0
    """1 where kept pages pass through VRAM, else 0."""
    kept_files: Amount = 0
    activations: Amount = 0
    staged: int = 0
    """Of VRAM: one token's experts of a layer, in one place for recorded kernels."""
    drafter: Mapping[Tier, Amount] = field(default_factory=dict)
    """Of VRAM and DRAM: all that the model takes which drafts; empty where none does."""
    verify: int = 0
    """Of VRAM: passes that are recorded to verify drafts."""
    prompts: int = 0
    """Of VRAM: layers that are recorded for prompts."""


def vram_items(hardware: HardwareProfile, model: ModelSpec, workload: Workload, held: Held) -> dict[str, Amount]:
    """Bytes of VRAM by item, the guard included; empty without a GPU."""
    if hardware.gpu is None:
        return {}
    return {
        "context": hardware.gpu.context_bytes,
        "workspace": OVERHEADS.cuda_workspace_bytes,
        "norms": model.norm_bytes,
        "embedding": held.embedding,
        "residents": held.residents,
        "ring": held.ring,
        "experts": held.expert_slots.get(Tier.vram, 0) * expert_vram_bytes(model.experts) if model.experts else 0,
        "kv": held.kv.get(Tier.vram, 0) + held.states,
        "kv_ring": held.kv_passing.get(Tier.vram, 0),
        "kv_reuse": held.kept_pages.get(Tier.vram, 0) * held.kept_page_bytes,
        "kv_bounce": held.bounces * (OVERHEADS.kv_bounce_pages * held.kept_page_bytes),
        "activations": held.activations,
        "scratch": scratch_bytes(model) + held.staged,
        **({"hops": hardware.links.vram_bytes} if model.dealt is not None and model.dealt.count > 1 else {}),
        **({"drafter": held.drafter[Tier.vram]} if held.drafter else {}),
        **({"verify": held.verify} if held.verify else {}),
        **({"prompts": held.prompts} if held.prompts else {}),
        "guard": workload.vram_guard_bytes,
    }


def dram_items(hardware: HardwareProfile, model: ModelSpec, workload: Workload, held: Held) -> dict[str, Amount]:
    """Bytes of DRAM by item, the reserve included. Without a GPU everything that computes lies here."""
    items = {
        "layer_cache": held.layer_cache,
        "experts": held.expert_slots.get(Tier.dram, 0) * expert_dram_bytes(model.experts) if model.experts else 0,
        "staging": held.staging,
        "embedding_head": held.tables + OVERHEADS.tables_padding_bytes,
        "kv": held.kv.get(Tier.dram, 0),
        "kv_staging": held.kv_passing.get(Tier.dram, 0),
        "kv_reuse": held.kept_pages.get(Tier.dram, 0) * held.kept_page_bytes,
        "workspace": dram_workspace_bytes(hardware, model),
    }
    if hardware.gpu is None:
        items |= {"norms": model.norm_bytes, "activations": held.activations, "scratch": scratch_bytes(model)}
        items["kv"] += held.states
    if held.drafter:
        items["drafter"] = held.drafter[Tier.dram]
    return items | {"reserve": workload.dram_reserve_bytes}


def ssd_items(model: ModelSpec, held: Held) -> dict[str, Amount]:
    """Bytes of SSD by item: the checkpoint, the KV pages that spill and those that are kept."""
    return {"weights": model.weight_bytes, "kv": held.kv.get(Tier.ssd, 0), "kv_reuse": held.kept_files}


def held_by(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> Held:
    """By a plan's ``decisions``."""
    held = _held_unrecorded(hardware, model, workload, decisions)
    return replace(held, verify=recorded_bytes(model, _shapes_beside(hardware, model, workload, decisions, held)))


def recorded_shapes(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> tuple[VerifyShape, ...]:
    """Of :func:`shapes_wanted`, the first ones: as many as VRAM has room for beside all that ``decisions`` put there."""
    return _shapes_beside(hardware, model, workload, decisions, _held_unrecorded(hardware, model, workload, decisions))


def shapes_wanted(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> tuple[VerifyShape, ...]:
    """Passes that verify the drafts of ``decisions`` and can be recorded."""
    drafts, gpu = decisions.speculation.tokens, hardware.gpu is not None
    if not drafts or not records_whole(model) or not is_recorded(hardware, place(model, decisions.weights, gpu), decisions.kv):
        return ()
    shapes = verify_shapes(decisions.batch, drafts)
    if decisions.speculation.drafter is Drafter.mtp:  # further heads read hidden states of rows that stand side by side
        shapes = tuple(shape for shape in shapes if shape.rows == 1)
    return shapes


def _shapes_beside(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, held: Held
) -> tuple[VerifyShape, ...]:
    shapes = shapes_wanted(hardware, model, decisions)
    left = hardware.vram_bytes - sum(vram_items(hardware, model, workload, held).values()) if shapes else 0
    while shapes and recorded_bytes(model, shapes) > left:
        shapes = shapes[:-1]
    return shapes


def _held_unrecorded(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> Held:
    kv, experts, gpu = decisions.kv, decisions.experts, hardware.gpu is not None
    placement = place(model, decisions.weights, gpu)
    page, layer = kv_page_bytes(model, kv.page_tokens), kv_layer_bytes(model, kv)
    activations = card_activation_bytes if gpu else activation_bytes
    return Held(
        residents=sum(unit_vram_bytes(nbytes) * count for nbytes, count in placement.resident_sizes.items()),
        ring=ring_bytes(placement),
        embedding=placement.embed_vram_bytes,
        layer_cache=placement.dram_slots * dram_slot_bytes(placement),
        staging=decisions.weights.ssd.staging_bytes,
        tables=placement.head_dram_bytes,
        expert_slots={Tier.vram: experts.vram_slots, Tier.dram: experts.dram_slots} if experts else {},
        kv={Tier.vram: kv.vram_pages * page, Tier.dram: kv.dram_pages * page, Tier.ssd: kv.ssd_pages * page},
        states=decisions.batch * model.state_bytes,
        kv_passing={Tier.vram: kv_ring_slots(model, kv) * layer, Tier.dram: kv_staging_slots(model, kv) * layer},
        kept_pages={Tier.vram: kv.reuse.vram_pages, Tier.dram: kv.reuse.dram_pages},
        kept_page_bytes=kept_page_bytes(model, kv.page_tokens),
        bounces=int(bool(kv.reuse.dram_pages or kv.reuse.ssd_bytes)),
        kept_files=kv.reuse.ssd_bytes,
        activations=activations(model, workload, decisions.batch, decisions.prefill_chunk_tokens, decisions.prefill_part_tokens),
        staged=staged_experts_bytes(hardware, model, decisions.batch),
        drafter=drafter_bytes(hardware, model, workload, decisions),
        prompts=recorded_prompt_bytes(model, decisions.recorded_prompt_tokens),
    )


def staged_experts_bytes(hardware: HardwareProfile, model: ModelSpec, batch: int) -> int:
    """Of VRAM: what a step of ``batch`` sequences copies a layer's experts into, where it is recorded."""
    return staged_bytes(model, batch) if can_record(hardware, model) else 0


def drafter_bytes(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> dict[Tier, int]:
    """Of VRAM and DRAM: weights, K and V and activations of the model that drafts for ``model``, and the hidden states that further heads
    read; empty where none does."""
    drafter = decisions.speculation.model
    if drafter is None:
        return {}
    held = held_by(hardware, drafter, workload, resident(drafter, decisions, model.layers, hardware.gpu is not None))
    vram, dram = vram_items(hardware, drafter, workload, held), dram_items(hardware, drafter, workload, held)
    taken = {
        Tier.vram: used_bytes({item: n for item, n in vram.items() if item not in ONCE_A_PROCESS}),
        Tier.dram: used_bytes(dram),
    }
    if decisions.speculation.drafter is Drafter.mtp:
        taken[Tier.dram if hardware.gpu is None else Tier.vram] += states_bytes(model, workload, decisions)
    return taken


def vram_use(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> dict[str, int]:
    """Bytes of VRAM by item, the guard included; empty without a GPU."""
    return vram_items(hardware, model, workload, held_by(hardware, model, workload, decisions))


def dram_use(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> dict[str, int]:
    """Bytes of DRAM by item, the reserve included."""
    return dram_items(hardware, model, workload, held_by(hardware, model, workload, decisions))


def ssd_use(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> dict[str, int]:
    """Bytes of SSD by item."""
    kv = {Tier.ssd: decisions.kv.ssd_pages * kv_page_bytes(model, decisions.kv.page_tokens)}
    return ssd_items(model, Held(kv=kv, kept_files=decisions.kv.reuse.ssd_bytes))


def arena_bytes(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> int:
    """DRAM that the runtime allocates at the start for a plan, known before the checkpoint is read: layer cache, experts, staging, tables,
    buffers, kept pages.

    An upper bound if each unit of the checkpoint lies in a few pieces. Of a unit in many pieces, padding takes more.
    """
    placement = place(model, decisions.weights, hardware.gpu is not None)
    sizes = [placement.dram_slots * (dram_slot_bytes(placement) + OVERHEADS.pieces_padding_bytes), decisions.weights.ssd.staging_bytes]
    if model.experts and decisions.experts:
        sizes.append(decisions.experts.dram_slots * expert_dram_bytes(model.experts))
    sizes.append(decisions.kv.reuse.dram_pages * kept_page_bytes(model, decisions.kv.page_tokens))
    if hardware.gpu is None:
        tables = model.embed_bytes + model.head_bytes + model.norm_bytes
        pieces = OVERHEADS.outside_per_layer * (model.layers + 1)
    else:
        in_dram = sum(tier is Tier.dram for tier in placement.head)
        embedding = model.embed_bytes if decisions.weights.embedding is Tier.dram else 0
        tables, pieces = embedding + in_dram * placement.head_block_bytes, 1 + in_dram
        sizes.append(OVERHEADS.bounce_bytes)
    sizes += [align_up(kv_layer_bytes(model, decisions.kv))] * kv_arena_slots(hardware, model, decisions.kv)
    return sum(map(align_up, sizes)) + align_up(tables) + pieces * OVERHEADS.unit_padding_bytes


def ssd_in_place_bytes(model: ModelSpec) -> int:
    """Of ``ssd_use``, what lies on an SSD already, so that free space need not hold it: the weights of a checkpoint that exists."""
    return model.weight_bytes if model.checkpoint else 0


def ssd_need(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> dict[str, int]:
    """Bytes of free SSD space by item."""
    use = ssd_use(hardware, model, workload, decisions)
    return use | {"weights": use["weights"] - ssd_in_place_bytes(model)}


def used_bytes(use: dict[str, int]) -> int:
    """Bytes that are really taken: what must be left alone not counted."""
    return sum(n for item, n in use.items() if item not in LEFT_ALONE)
