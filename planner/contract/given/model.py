"""What is known of a model: the bytes of each unit, its FLOPs, its KV cache, its experts."""

from __future__ import annotations

from dataclasses import dataclass

SECOND_TIER = 0.5
"""What a slot of the tier with fewer of them counts beside one of the other without routings, since both tiers keep some of the same
experts: DRAM's policy sees what VRAM misses, and what VRAM lets go is not copied back. With the mix on decode steps of a small Mixtral
(8 experts, top-2), DRAM keeping m beside VRAM's n: 3.1 % missed by both with 2 + 4, 4.2 with 3 + 3, 1.9 with 4 + 4, 1.3 with 2 + 5, 3.3
with 1 + 5, against 7.3 with 4 slots of one tier, 3.1 with 5 and 1.1 with 6. Under LRU both keep much the same: 12.9 % with 2 + 4, 9.8 with
4 alone."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of the MoE layers: each of them is a unit of its own."""

    count: int
    """In one layer."""
    top_k: int
    expert_bytes: int
    layers: tuple[int, ...]
    """The decoder layers that have them; the others are dense."""
    hit_rates: tuple[float, ...]
    """Share of one token's experts that a layer finds in n slots of its own, for n = 0, ..., ``count``: from 0 to 1, rising, and by less
    with every slot."""
    foreseen: float = 0.0
    """Share of a decode step's missed experts that routers asked beforehand name a layer before their own: 0 without routings."""
    second_tier: float = SECOND_TIER
    """What a slot of the tier with fewer of them counts for one token beside one of the other: from 0, where it adds nothing, to 1."""

    @property
    def units(self) -> int:
        """Experts of all layers."""
        return self.count * len(self.layers)

    @property
    def nbytes(self) -> int:
        """Of all experts."""
        return self.units * self.expert_bytes


@dataclass(frozen=True)
class ModelSpec:
    """A decoder as the planner sees it. All sizes in bytes as stored; tuples have one entry a layer."""

    name: str
    model_type: str
    attn_bytes: tuple[int, ...]
    """Parameters under ``self_attn``, its inner norms included."""
    ffn_bytes: tuple[int, ...]
    """Parameters under ``mlp`` but for routed experts: of an MoE layer the router and the experts that every token visits."""
    norm_bytes: int
    """Everything that is always resident: layer norms, the final norm, other small tensors."""
    embed_bytes: int
    head_bytes: int
    """The LM head's own bytes: 0 when it is tied to the embedding table."""
    tied: bool
    vocab: int
    hidden: int
    attn_width: int
    """Query heads × head_dim."""
    kv_width: int
    """KV heads × head_dim; K and V together hold twice this per token and layer."""
    ffn_width: int
    """Elements of the widest FFN activation of one token (for MoE: over its top-k experts)."""
    dtype_bytes: int
    experts: Experts | None
    checkpoint: str | None = None
    digest: str | None = None
    """Identity of the weights: xxh3 over config.json and the tensors' names, shapes and offsets."""

    @property
    def routed(self) -> str:
        """What its routed experts are, whatever is known of their use."""
        e = self.experts
        return "none" if e is None else f"top-{e.top_k} of {e.count} experts of {e.expert_bytes} bytes in {len(e.layers)} layers"

    @property
    def layers(self) -> int:
        return len(self.attn_bytes)

    @property
    def attn_max(self) -> int:
        return max(self.attn_bytes)

    @property
    def ffn_max(self) -> int:
        return max(self.ffn_bytes)

    @property
    def lm_head_bytes(self) -> int:
        """Bytes that the LM head multiplies by, tied or not."""
        return self.embed_bytes if self.tied else self.head_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each stored tensor once."""
        routed = self.experts.nbytes if self.experts else 0
        return sum(self.attn_bytes) + sum(self.ffn_bytes) + routed + self.norm_bytes + self.embed_bytes + self.head_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.kv_width * self.dtype_bytes * self.layers

    def ffn_active_bytes(self, layer: int, tokens: int) -> float:
        """FFN bytes that ``tokens`` tokens of one forward touch in ``layer``, its routed experts included."""
        e = self.experts
        if e is None or layer not in e.layers:
            return self.ffn_bytes[layer]
        return self.ffn_bytes[layer] + touched_experts(e, tokens) * e.expert_bytes

    @property
    def flops_per_token(self) -> float:
        """Multiply-adds × 2 of one token through every layer and the LM head, attention scores left out."""
        params = sum(self.attn_bytes[i] + self.ffn_active_bytes(i, 1) for i in range(self.layers))
        return 2 * (params + self.lm_head_bytes) / self.dtype_bytes

    def attention_flops(self, context: float) -> float:
        """FLOPs of one token's attention over ``context`` tokens, all layers: QK^T and PV, 2 each per element."""
        return 4 * self.attn_width * context * self.layers


def touched_experts(experts: Experts, tokens: int) -> float:
    """Experts of one layer that ``tokens`` tokens visit: a uniform router with top-k of E leaves each unvisited with probability
    (1 - k/E)**tokens."""
    return experts.count * (1 - (1 - experts.top_k / experts.count) ** tokens)
