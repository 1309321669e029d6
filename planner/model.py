"""What is known of a model: the bytes of each unit, its FLOPs, its KV cache, its experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Experts:
    """The routed experts of one MoE layer."""

    count: int
    top_k: int
    expert_bytes: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder as the planner sees it. All sizes in bytes as stored; tuples have one entry a layer."""

    name: str
    model_type: str
    attn_bytes: tuple[int, ...]
    """Parameters under ``self_attn``, its inner norms included."""
    ffn_bytes: tuple[int, ...]
    """Parameters under ``mlp``: the router and every expert included."""
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
        return sum(self.attn_bytes) + sum(self.ffn_bytes) + self.norm_bytes + self.embed_bytes + self.head_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * self.kv_width * self.dtype_bytes * self.layers

    def ffn_active_bytes(self, layer: int, tokens: int) -> float:
        """FFN bytes that ``tokens`` tokens of one forward touch in ``layer``.

        A dense FFN is touched whole. Of E experts with top-k routing, a uniform router leaves each untouched with
        probability (1 - k/E)**tokens.
        """
        e = self.experts
        if e is None or self.ffn_bytes[layer] < e.count * e.expert_bytes:
            return self.ffn_bytes[layer]
        touched = e.count * (1 - (1 - e.top_k / e.count) ** tokens)
        return self.ffn_bytes[layer] - (e.count - touched) * e.expert_bytes

    @property
    def flops_per_token(self) -> float:
        """Multiply-adds × 2 of one token through every layer and the LM head, attention scores left out."""
        params = sum(self.attn_bytes[i] + self.ffn_active_bytes(i, 1) for i in range(self.layers))
        return 2 * (params + self.lm_head_bytes) / self.dtype_bytes

    def attention_flops(self, context: float) -> float:
        """FLOPs of one token's attention over ``context`` tokens, all layers: QK^T and PV, 2 each per element."""
        return 4 * self.attn_width * context * self.layers
