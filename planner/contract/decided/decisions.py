"""What a plan decides: the types behind the ``weights``, ``kv`` and ``experts`` sections of a plan file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where bytes live. On a machine without a GPU the CPU computes from ``dram``."""

    vram = "vram"
    dram = "dram"
    ssd = "ssd"


class CachePolicy(StrEnum):
    """How the DRAM cache treats layers: some kept still, or all rolling through."""

    pinned = "pinned"
    rolling = "rolling"


@dataclass(frozen=True)
class ResidentUnits:
    """Units kept in VRAM for the whole run, per kind."""

    attn: int
    ffn: int
    head: int


@dataclass(frozen=True)
class VramWeights:
    resident_units: ResidentUnits
    slots: int
    """Ring slots for streamed units; half serve attention units, half FFN units and LM-head blocks."""
    prefetch_distance: int
    """Units that may be copied ahead of the one that computes."""


@dataclass(frozen=True)
class DramWeights:
    cap_layers: int
    hwm_layers: int
    prefetch_distance: int
    """Layers that may be read ahead of the current one."""
    resident_layers: int
    """Layers that never leave DRAM: ``cap_layers`` under ``pinned``, 0 under ``rolling``."""


@dataclass(frozen=True)
class SsdReads:
    block_bytes: int
    queue_depth: int
    staging_bytes: int


@dataclass(frozen=True)
class H2dCopies:
    chunk_bytes: int
    in_flight: int


@dataclass(frozen=True)
class WeightDecisions:
    policy: CachePolicy
    embedding: Tier
    """Where embedding rows are looked up: ``vram`` or ``dram``."""
    head_blocks: int
    """Equal row blocks that the LM head is cut into, so that a block fits a ring slot (1 without a GPU)."""
    vram: VramWeights
    dram: DramWeights
    ssd: SsdReads
    h2d: H2dCopies


@dataclass(frozen=True)
class KvReuse:
    """Room for the KV of prompts that were computed, to be restored by later ones that begin alike. Here a page holds all layers of
    ``page_tokens`` tokens of one sequence, unlike a page of ``KvPages``, which holds one layer of them."""

    vram_pages: int = 0
    """L1. None without a GPU."""
    dram_pages: int = 0
    """L2, page-locked."""
    ssd_bytes: int = 0
    """L3: files of pages, which outlive the process, so it has copies of the other tiers' pages, too."""


@dataclass(frozen=True)
class KvPages:
    """Pages of one layer's K and V for ``page_tokens`` tokens of one sequence. All pages of a layer lie in one tier, so that a layer's KV
    streams as one copy."""

    page_tokens: int
    vram_pages: int
    dram_pages: int
    ssd_pages: int
    reuse: KvReuse = KvReuse()

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


@dataclass(frozen=True)
class ExpertSlots:
    """Slots for routed experts, of one expert each. ``contract.experts.expert_slots`` says how many of a tier's slots keep
    experts of which layer, and how many are left for those that pass through."""

    vram_slots: int
    """0 without a GPU."""
    dram_slots: int
    policy: ExpertPolicyName = ExpertPolicyName.mix
    """What each tier keeps, by an instance of its own."""
    prefetch: int = 0
    """Experts of a coming layer that may be brought to where they are computed ahead of its router in one decode step; 0 waits for it."""
    read_ahead: int = 0
    """The same from the SSD into DRAM, beside a GPU: a read takes longer than a copy, and what a layer's compute does not hide of a wrong
    one delays those that are wanted."""
    in_flight: int = 2
    """Chunks of prefetched experts that are queued on the link at most: what a demanded expert may have to wait for."""
    chunk_bytes: int = 32 * 2**20
    """Bytes of one copy of a part of an expert."""

    def into_dram(self, gpu: bool) -> int:
        """Experts of a coming layer that the DRAM tier may read ahead."""
        return self.read_ahead if gpu else self.prefetch


@dataclass(frozen=True)
class Decisions:
    """Everything that the solver chooses, and nothing that follows from it."""

    weights: WeightDecisions
    kv: KvPages
    experts: ExpertSlots | None
    batch: int
    prefill_chunk_tokens: int
    """Prompt tokens per sequence in one pass over the weights."""
