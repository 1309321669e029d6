"""What a plan decides: the types behind the ``weights``, ``kv`` and ``experts`` sections of a plan file.

Each decision is declared here and nowhere else: its name, its type and its docstring, and in ``Annotated`` what it may be, the key that
fixes it and its words on the terminal (:class:`Decision`). What it may be is a constant, or follows from a plan
(:class:`contract.rules.setting.Setting`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from penstock.planner.common.measures import ALIGN
from penstock.planner.common.outside.bounds import MOST_DEPTH
from penstock.planner.contract.decided.allowed import OneOf, Span
from penstock.planner.contract.decided.decision import Decision
from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.decided.speculating import Speculation
from penstock.planner.contract.given.unit_spec import UnitKind


class Tier(StrEnum):
    """Where bytes live. On a machine without a GPU the CPU computes from ``dram``."""

    vram = "vram"
    dram = "dram"
    ssd = "ssd"


class CachePolicy(StrEnum):
    """How the DRAM cache treats layers: some pinned, or all streamed through a rolling window."""

    pinned = "pinned"
    rolling = "rolling"


class WeightForm(StrEnum):
    """In which form a unit stays whose matrices a checkpoint stores coded."""

    stored = "stored"
    """As the checkpoint has it: more of them fit, and each product decodes."""
    decoded = "decoded"
    """Decoded once, when it is loaded."""


@dataclass(frozen=True)
class ResidentUnits:
    """Units kept in VRAM for the whole run, per kind."""

    attn: Annotated[int, Decision(lambda s: s.resident(s.model.layers), "force.resident_attn", "VRAM", "{} attn", weighed=True, card=True)]
    """Attention units resident in VRAM."""
    ffn: Annotated[int, Decision(lambda s: s.resident(s.model.layers), "force.resident_ffn", "VRAM", "{} ffn", weighed=True, card=True)]
    """FFN units resident in VRAM."""
    head: Annotated[
        int,
        Decision(lambda s: s.resident(s.weights.head_blocks), "force.resident_head", "VRAM", "{} head", weighed=True, card=True),
    ]
    """LM-head blocks resident in VRAM."""


@dataclass(frozen=True)
class VramWeights:
    resident_units: ResidentUnits
    slots: Annotated[int, Decision(lambda s: s.ring_slots, "force.vram_slots", "VRAM ring", "{} slots", weighed=True, card=True)]
    """Ring slots in VRAM for units that stream."""
    prefetch_distance: Annotated[
        int, Decision(lambda s: s.ring_distance, "force.vram_prefetch_distance", "VRAM ring", "{} units ahead", card=True, aside=True)
    ]
    """Units that may be copied ahead of the one that computes."""
    ffn_slots: Annotated[int, Decision(lambda s: s.ring_ffn_slots, "force.vram_ffn_slots", "VRAM ring", "", card=True, aside=True)] = 0
    """Of the ring's slots, those of FFN units and LM-head blocks where attention units stream, too; 0: half of them."""


@dataclass(frozen=True)
class ResidentForms:
    """In which form units stay in VRAM, per kind. What streams is stored, and so are routed experts."""

    attn: Annotated[
        WeightForm,
        Decision(lambda s: s.forms(s.model.attn_coded), "force.attn_form", "VRAM", "attn {}", weighed=True, card=True, aside=True),
    ] = WeightForm.stored
    """In which form attention units stay in VRAM: as stored, or decoded when they are loaded."""
    ffn: Annotated[
        WeightForm,
        Decision(lambda s: s.forms(s.model.ffn_coded), "force.ffn_form", "VRAM", "ffn {}", weighed=True, card=True, aside=True),
    ] = WeightForm.stored
    """In which form FFN units stay in VRAM: as stored, or decoded when they are loaded."""

    @property
    def decoded(self) -> frozenset[UnitKind]:
        """Kinds that stay decoded."""
        kinds = ((UnitKind.attn, self.attn), (UnitKind.ffn, self.ffn))
        return frozenset(kind for kind, form in kinds if form is WeightForm.decoded)


@dataclass(frozen=True)
class DramWeights:
    cap_layers: Annotated[int, Decision(lambda s: s.cap, "force.cap_layers", "DRAM cache", "cap {}", weighed=True)]
    """Layers that the DRAM cache holds in the steady state."""
    hwm_layers: Annotated[int, Decision(lambda s: s.hwm, "force.hwm_layers", "DRAM cache", "HWM {}", weighed=True)]
    """Layers that it ever holds: its high-water mark."""
    prefetch_distance: Annotated[
        int, Decision(lambda s: s.layers_ahead, "force.prefetch_distance", "DRAM cache", "{} layers ahead", aside=True)
    ]
    """Layers that may be read ahead of the current one."""
    resident_layers: Annotated[int, Decision(lambda s: s.resident_layers, None, "DRAM cache", "{} kept", aside=True)]
    """Layers that never leave DRAM: ``cap_layers`` under ``pinned``, 0 under ``rolling``."""


@dataclass(frozen=True)
class SsdReads:
    block_bytes: Annotated[
        int,
        Decision(Span(ALIGN, multiple=ALIGN, rule="block multiple of 4096"), "force.block_bytes", "SSD reads", "{} blocks", weighed=True),
    ]
    """Bytes of one SSD read."""
    queue_depth: Annotated[int, Decision(Span(1, MOST_DEPTH), "force.queue_depth", "SSD reads", "{} in flight", weighed=True)]
    """SSD reads in flight."""
    staging_bytes: Annotated[int, Decision(lambda s: s.staging, "force.staging_bytes", "SSD reads", "staging {}", aside=True)]
    """Page-locked buffers for reads that cannot land in their slot."""


@dataclass(frozen=True)
class H2dCopies:
    chunk_bytes: Annotated[int, Decision(Span(1), "force.chunk_bytes", "H2D copies", "{} chunks", weighed=True, card=True)]
    """Bytes of one host-to-device copy."""
    in_flight: Annotated[int, Decision(Span(1, MOST_DEPTH), "force.in_flight", "H2D copies", "{} in flight", card=True)]
    """Copies that are queued at most."""


@dataclass(frozen=True)
class WeightDecisions:
    policy: Annotated[CachePolicy, Decision(OneOf(tuple(CachePolicy)), "force.policy", "policy", weighed=True)]
    """How the DRAM cache treats layers: pinned keeps `cap` layers resident, rolling streams all of them."""
    embedding: Annotated[
        Tier, Decision(lambda s: s.embedding, "force.embedding", "VRAM", "embedding in {}", weighed=True, card=True, aside=True)
    ]
    """Where embedding rows are looked up."""
    head_blocks: Annotated[int, Decision(lambda s: s.head_blocks, None, "VRAM", "LM head in {} blocks", card=True, aside=True)]
    """Equal row blocks that the LM head is cut into, so that a block fits a ring slot (1 without a GPU)."""
    vram: VramWeights
    dram: DramWeights
    ssd: SsdReads
    h2d: H2dCopies
    forms: ResidentForms = ResidentForms()
    host: HostUnits = HostUnits()

    def with_host_ffn(self, count: int) -> WeightDecisions:
        """The same with so many FFN units of the CPU's. Units lie where they lay."""
        return replace(self, host=replace(self.host, ffn=count))


@dataclass(frozen=True)
class KvReuse:
    """Room for the KV of prompts that were computed, to be restored by later ones that begin alike. Here a page holds all layers of
    ``page_tokens`` tokens of one sequence, unlike a page of ``KvPages``, which holds one layer of them."""

    vram_pages: Annotated[int, Decision(lambda s: s.kept_in_vram, None, "KV kept", "{} in VRAM", card=True)] = 0
    """L1. None without a GPU."""
    dram_pages: Annotated[int, Decision(Span(), None, "KV kept", "{} in DRAM")] = 0
    """L2, page-locked."""
    ssd_bytes: Annotated[int, Decision(Span(), None, "KV kept", "files {}", aside=True)] = 0
    """L3: files of pages, which outlive the process, so it has copies of the other tiers' pages, too."""


@dataclass(frozen=True)
class KvPages:
    """Pages of one layer's K and V for ``page_tokens`` tokens of one sequence. All pages of a layer lie in one tier, so that a layer's KV
    streams as one copy."""

    page_tokens: Annotated[int, Decision(lambda s: s.page_tokens, "force.page_tokens", "KV", "pages of {} tokens", weighed=True)]
    """Tokens of a KV page."""
    vram_pages: Annotated[int, Decision(Span())]
    dram_pages: Annotated[int, Decision(Span())]
    ssd_pages: Annotated[int, Decision(Span())]
    reuse: KvReuse = KvReuse()
    host_layers: Annotated[
        int, Decision(lambda s: s.host_attention, "force.host_attention", "attention", "of {} layers by the CPU", weighed=True, card=True)
    ] = 0
    """Layers whose attention the CPU computes in decode steps, over K and V that lie in DRAM; prompts stream them. 0: the card computes
    all of it."""

    @property
    def pages(self) -> int:
        return self.vram_pages + self.dram_pages + self.ssd_pages

    def of(self, tier: Tier) -> int:
        """Pages in ``tier``."""
        return {Tier.vram: self.vram_pages, Tier.dram: self.dram_pages, Tier.ssd: self.ssd_pages}[tier]


class ExpertPolicyName(StrEnum):
    """Which experts a tier keeps, and which it fetches ahead of their layer: ``penstock.planner.contract.experts.policies``."""

    lru = "lru"
    lfu = "lfu"
    static = "static"
    gating = "gating"
    markov = "markov"
    trajectory = "trajectory"
    lookahead = "lookahead"
    mix = "mix"


class MissedExperts(StrEnum):
    """What becomes of a decode step's experts that VRAM misses and DRAM holds."""

    copied = "copied"
    """All are copied to the card: the CPU computes none."""
    split = "split"  # type: ignore[assignment]  # str.split, which nobody asks of it
    """Some are computed by the CPU where they lie, so many that both sides end together: ``contract.experts.host_split``."""


@dataclass(frozen=True)
class ExpertSlots:
    """Slots for routed experts, of one expert each. ``contract.experts.expert_slots`` says how many of a tier's slots keep
    experts of which layer, and how many are left for those that pass through."""

    vram_slots: Annotated[
        int, Decision(lambda s: s.expert_vram_slots, "force.expert_vram_slots", "experts", "{} in VRAM", weighed=True, card=True)
    ]
    """Slots for routed experts in VRAM, over all layers; 0 without a GPU."""
    dram_slots: Annotated[int, Decision(lambda s: s.expert_dram_slots, "force.expert_dram_slots", "experts", "{} in DRAM", weighed=True)]
    """Slots for routed experts in DRAM."""
    policy: Annotated[ExpertPolicyName, Decision(OneOf(tuple(ExpertPolicyName)), "moe.policy", "experts", "policy {}", aside=True)] = (
        ExpertPolicyName.mix
    )
    """Which experts a tier keeps, by an instance of its own; null is mix."""
    prefetch: Annotated[int, Decision(lambda s: s.one_tokens, "moe.prefetch", "  ahead", "{} of a layer")] = 0
    """Experts of each coming layer that may be fetched ahead of its router in one decode step; 0 waits for it, and lookahead alone knows of
    layers beyond the next."""
    read_ahead: Annotated[int, Decision(lambda s: s.read_ahead, "moe.read_ahead", "  ahead", "{} from the SSD", card=True)] = 0
    """The same from the SSD into DRAM, beside a GPU. A read takes longer than a copy, and a wrong one delays reads of missing experts.
    Without a GPU `moe.prefetch` is what the SSD reads."""
    in_flight: Annotated[int, Decision(Span(1, 8), "moe.in_flight", "  ahead", "{} chunks in flight", card=True, aside=True)] = 2
    """Chunks of prefetched experts that are queued on the link at most: what a demanded expert may have to wait for."""
    chunk_bytes: Annotated[int, Decision(lambda s: s.expert_chunk, "moe.chunk_bytes", "  ahead", "{} each", card=True, aside=True)] = (
        32 * 2**20
    )
    """Bytes of one copy of a part of an expert."""
    least_chance: Annotated[float, Decision(Span(0, 1), "moe.least_chance", "  ahead", "from a chance of {}", aside=True)] = 0.5
    """Experts at least this probable are fetched ahead. A right guess gains what the link carries while a layer computes. A wrong guess
    costs about as much: a missing expert waits for the queued chunks. `planner replay least_chance=` tries others on your routings."""
    host: Annotated[MissedExperts, Decision(lambda s: s.missed_experts, "moe.host", "experts", "missed {}", card=True, aside=True)] = (
        MissedExperts.copied
    )
    """Whether the CPU computes some of a decode step's missed experts where they lie in DRAM, while others are copied (`split`), or all
    are copied; null takes the faster way, and of two that differ by less than 1 % `copied`."""


@dataclass(frozen=True)
class Decisions:
    """Everything that the solver chooses, and nothing that follows from it."""

    weights: WeightDecisions
    kv: KvPages
    experts: ExpertSlots | None
    batch: Annotated[int, Decision(Span(1), None, "prefill", "batch {}", aside=True)]
    prefill_chunk_tokens: Annotated[int, Decision(Span(1), "force.prefill_chunk_tokens", "prefill", "{} tokens a pass", weighed=True)]
    """Prompt tokens of a sequence in one pass over the weights."""
    speculation: Speculation = Speculation()
    prefill_part_tokens: Annotated[
        int, Decision(lambda s: s.part_tokens, "force.prefill_part_tokens", "parts", "of {} tokens of a prompt go from rank to rank")
    ] = 0
    """Of several ranks: tokens of a prompt's pass, of all its sequences, that go through a layer together. The next rank begins with them
    while this one computes the next part. 0: all of them."""
    recorded_prompt_tokens: Annotated[
        int,
        Decision(
            lambda s: s.recorded_prompt_tokens,
            "force.recorded_prompt_tokens",
            "prompts",
            "recorded around attention, for {} tokens",
            card=True,
            placed=True,
        ),
    ] = 0
    """Tokens of a prompt's pass, or of one of its parts, whose layers are recorded around their attention. Passes of as many tokens, or of
    more than half of them, are launched so. 0: prompts are launched kernel by kernel."""
