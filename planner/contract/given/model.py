"""What is known of a model: its units, its FLOPs, its KV cache, its experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated

from penstock.planner.common.outside.bounds import COUNT_BYTES, Bounds
from penstock.planner.contract.given.dealt import Dealt
from penstock.planner.contract.given.formats import Dtype, Format
from penstock.planner.contract.given.unit_spec import PER_LAYER, UnitKind, UnitSpec

_WIDTH = Bounds(0, 2**32)
"""Elements."""
OWN_ATTENTION = frozenset({"bloom", "codegen", "falcon", "gptj", "minimax", "mpt"})
"""Model types whose classes in `transformers` do not attend through its interface: they keep K and V in caches of their own."""

SECOND_TIER = 0.75
"""What a slot of the smaller tier counts beside one of the larger, if no routings are given. Both tiers hold some of the same experts:
what is copied from DRAM lies in both, and an expert that VRAM evicts is not copied back.

With mix and shares (VRAM, DRAM) of all experts, the weights by which both tiers' misses lie on the curve of one. A trained Mixtral of 6
layers: (1/4, 1/2) 0.64, (3/8, 1/4) 0.94, (1/8, 5/8) 1.0, (1/2, 3/8) 0.66, (3/8, 1/2) 0.72, (1/8, 1/2) 1.0. Made-up routings
(bench/routing.py): (1/4, 1/2) 0.78, (1/8, 5/8) 0.88, (1/2, 3/8) 0.93, (3/8, 1/2) 0.88, (1/8, 3/8) 0.88. Routers drawn by recency, of
which mix misses more: 0.2 to 0.7.
"""

ALONE = 0.4
"""Of the experts that the larger tier does not keep, the share that the smaller one does beside :data:`ALONE_MORE`, if no routings are
given: what it evicts is lost until it is read again. That matters where both tiers together have nearly as many slots as there are experts.
"""

ALONE_MORE, ALONE_MOST = 0.2, 0.9
"""What each slot of the smaller tier adds to that, and up to which share.

Shares of what the larger tier lacks, found as :data:`SECOND_TIER` was: trained (1/4, 3/4) 0.60, (3/8, 3/4) 0.75; made up (1/4, 3/4) 0.69,
(1/3, 5/6) 0.89; drawn 0.29 to 0.55. The law: 0.60, 0.70, 0.60, 0.80.
"""


@dataclass(frozen=True)
class Experts:
    """The routed experts of the MoE layers: each of them is a unit of its own."""

    count: int
    """In one layer."""
    top_k: int
    expert_bytes: int
    """Of the largest, for which a slot has room. A file of mixed types (GGUF) has smaller ones in some layers; they are counted as it."""
    layers: tuple[int, ...]
    """The decoder layers that have them; the others are dense."""
    hit_rates: tuple[float, ...]
    """Share of one token's experts that a layer finds in n slots of its own, for n = 0, ..., ``count``. It rises from 0 to 1, by less with
    every slot."""
    foreseen: float = 0.0
    """Share of a decode step's missed experts that routers asked beforehand name a layer before their own: 0 without routings."""
    second_tier: float = SECOND_TIER
    """What a slot of the smaller tier counts, for one token, beside one of the larger: from 0, where it adds nothing, to 1."""
    alone: float = ALONE
    """See :data:`ALONE`: 1 where routings say what a slot of the smaller tier counts."""

    @property
    def units(self) -> int:
        """Experts of all layers."""
        return self.count * len(self.layers)

    @property
    def nbytes(self) -> int:
        """Of all experts."""
        return self.units * self.expert_bytes

    def pieces(self, chunk_bytes: int) -> int:
        """In which one is copied, of so many bytes at most."""
        return -(-self.expert_bytes // chunk_bytes)

    @property
    def routers(self) -> Routers:
        """What of them a model keeps beside its units."""
        return Routers(self.top_k, self.hit_rates, self.foreseen, self.second_tier, self.alone)


@dataclass(frozen=True)
class Routers:
    """What is known of an MoE model's routers, whatever its experts' size."""

    top_k: int
    """Experts that one token visits in a layer."""
    hit_rates: tuple[float, ...]
    """See :class:`Experts`, as the other three."""
    foreseen: float = 0.0
    second_tier: float = SECOND_TIER
    alone: float = ALONE


@dataclass(frozen=True)
class ModelSpec:
    """A decoder as the planner sees it.

    A size says what it is: ``..._bytes`` of weights are stored bytes, which links carry and tiers hold as they are; FLOPs follow from
    elements; activations have ``compute_dtype`` and the KV cache ``kv_dtype``. Tuples have one entry a layer.
    """

    name: str
    model_type: str
    units: tuple[UnitSpec, ...]
    """All weights, each stored tensor once."""
    tied: bool
    """Whether the LM head is the embedding table."""
    vocab: Annotated[int, Bounds(1, 2**31)]
    hidden: Annotated[int, Bounds(1, 2**24)]
    attn_width: Annotated[int, _WIDTH]
    """Query heads × head_dim."""
    kv_width: Annotated[int, _WIDTH]
    """KV heads × head_dim; K and V together hold twice this per token and layer."""
    ffn_width: Annotated[int, _WIDTH]
    """Elements of the widest FFN activation of one token (for MoE: over its top-k experts)."""
    compute_dtype: Dtype
    """Of activations, and of what products multiply."""
    kv_dtype: Dtype
    routers: Routers | None
    """None for a dense model."""
    checkpoint: str | None = None
    digest: str | None = None
    """Identity of the weights: xxh3 over config.json and the tensors' names, shapes and offsets."""
    kv_elements: Annotated[int | None, _WIDTH] = None
    """K and V of one token over all layers, where layers differ: some keep none, or have heads of another size. None where all layers are
    alike."""
    state_bytes: Annotated[int, COUNT_BYTES] = 0
    """What all layers together keep of one sequence beside K and V: states of linear attention, convolutions, Mamba."""
    max_tokens: Annotated[int, Bounds(0, 2**40)] = 0
    """Longest sequence that it is made for; 0: not known."""
    scratch_bytes: Annotated[int, COUNT_BYTES] = 0
    """Of the largest matrix that is stored coded, decoded: what products decode into; 0 where none is."""
    ffn_activation: str = ""
    """Of a model whose FFNs are each one MLP, gated or plain, and nothing else: ``silu``, ``gelu`` or ``gelu_tanh``. Empty for any other: a
    CPU cannot compute its FFNs beside a card."""
    dealt: Dealt | None = None
    """Of which part of a whole model this is; None for a whole one. A part's layers are numbered from 0."""

    def __hash__(self) -> int:
        """Of what tells most models apart: to hash every unit takes longer than most of what is kept by model."""
        return hash((self.name, self.digest, self.hidden, self.vocab, len(self.units)))

    def of_kind(self, kind: UnitKind) -> tuple[UnitSpec, ...]:
        """Its units of ``kind``, in the order of layers."""
        return self._by_kind.get(kind, ())

    @property
    def ffn_formats(self) -> frozenset[Format]:
        """Of routed experts, or of FFN units where there are none: what a CPU may multiply by beside a card."""
        return frozenset(unit.format for unit in self.of_kind(UnitKind.expert) or self.of_kind(UnitKind.ffn))

    @cached_property
    def _by_kind(self) -> Mapping[UnitKind, tuple[UnitSpec, ...]]:
        return {kind: tuple(unit for unit in self.units if unit.kind is kind) for kind in UnitKind}

    @cached_property
    def experts(self) -> Experts | None:
        """The routed experts; None for a dense model."""
        units, known = self.of_kind(UnitKind.expert), self.routers
        if not units or known is None:
            return None
        layers = tuple(unit.layer for unit in units if unit.layer is not None)
        one = max(units, key=lambda unit: unit.stored_bytes)
        told = known.hit_rates, known.foreseen, known.second_tier, known.alone
        return Experts(one.count, known.top_k, one.stored_bytes, layers, *told)

    @property
    def routed(self) -> str:
        """What its routed experts are, whatever is known of their use."""
        e = self.experts
        return "none" if e is None else f"top-{e.top_k} of {e.count} experts of {e.expert_bytes} bytes in {len(e.layers)} layers"

    @property
    def layers(self) -> int:
        return len(self.attn_bytes)

    @cached_property
    def attn_bytes(self) -> tuple[int, ...]:
        """Of each layer's attention unit."""
        return tuple(unit.stored_bytes for unit in self.of_kind(UnitKind.attn))

    @cached_property
    def ffn_bytes(self) -> tuple[int, ...]:
        """Of each layer's FFN unit, routed experts apart."""
        return tuple(unit.stored_bytes for unit in self.of_kind(UnitKind.ffn))

    @cached_property
    def attn_coded(self) -> bool:
        """Whether any attention unit is stored coded."""
        return any(unit.is_coded for unit in self.of_kind(UnitKind.attn))

    @cached_property
    def ffn_coded(self) -> bool:
        """Whether any FFN unit is, routed experts apart."""
        return any(unit.is_coded for unit in self.of_kind(UnitKind.ffn))

    @cached_property
    def coded(self) -> Mapping[UnitSpec, int]:
        """Units that a pass multiplies by and that are stored coded, each without its layer: how many are alike. Routed experts count by
        the layer."""
        blocks = (unit for kind in (UnitKind.attn, UnitKind.ffn, UnitKind.expert) for unit in self.of_kind(kind))
        return Counter(replace(unit, layer=None) for unit in (*blocks, self.lm_head) if unit.is_coded)

    def decoded(self, kinds: Collection[UnitKind]) -> ModelSpec:
        """The same with all units of ``kinds`` decoded, as products see them that stay so. Kept for the next time."""
        return _decoded(self, frozenset(kinds)) if kinds else self

    def stored_as(self, form: Format) -> ModelSpec:
        """The same with the layers' plain units stored in ``form``, as a checkpoint made so would be; it has no checkpoint."""

        def stored(unit: UnitSpec) -> UnitSpec:
            if unit.kind not in PER_LAYER or unit.is_coded or unit.stored_bytes < unit.elements:
                return unit
            return replace(unit, stored_bytes=min(unit.stored_bytes, form.stored_bytes(1, unit.elements)), format=form)

        widest = max(self.attn_width, self.ffn_width // self.routers.top_k if self.routers else self.ffn_width)
        scratch = max(self.scratch_bytes, 2 * self.hidden * widest * form.plain.nbytes)
        return replace(self, units=tuple(map(stored, self.units)), checkpoint=None, digest=None, scratch_bytes=scratch)

    @property
    def slices(self) -> int:
        """Of each routed expert, of which this has one; 1: it has all of it."""
        return 1 if self.dealt is None else self.dealt.slices

    def number_of(self, layer: int) -> int:
        """Of its own ``layer``: the number by which the layer's routed experts go."""
        return layer if self.dealt is None or self.slices == 1 else self.dealt.own[layer]

    @cached_property
    def moe(self) -> tuple[int, ...]:
        """The layers that route: of a rank those of its own, by their numbers here, whatever slices it has of others' experts."""
        routed = self.experts.layers if self.experts else ()
        return tuple(layer for layer in range(self.layers) if self.number_of(layer) in routed)

    @property
    def has_dense(self) -> bool:
        """Whether any layer's FFN is not routed."""
        return len(self.moe) < self.layers

    @cached_property
    def in_turn(self) -> ModelSpec:
        """What of it computes while its layers do: all but slices of other ranks' experts, which compute while theirs do."""
        if self.dealt is None or self.slices == 1:
            return self
        own = self.dealt.own
        return replace(self, units=tuple(unit for unit in self.units if unit.kind is not UnitKind.expert or unit.layer in own))

    @property
    def attn_max(self) -> int:
        return max(self.attn_bytes)

    @property
    def ffn_max(self) -> int:
        return max(self.ffn_bytes)

    @cached_property
    def norm_bytes(self) -> int:
        """Of everything that is always resident."""
        return sum(unit.stored_bytes for unit in self.of_kind(UnitKind.norm))

    @cached_property
    def embed_bytes(self) -> int:
        return sum(unit.stored_bytes for unit in self.of_kind(UnitKind.embed))

    @property
    def embed_row_bytes(self) -> int:
        """Of one token's row in the embedding table, as stored; 0 where a rank has no table."""
        return sum(unit.format.stored_bytes(1, self.hidden) for unit in self.of_kind(UnitKind.embed))

    @property
    def computes_embedding(self) -> bool:
        """Whether hidden states begin here: the ranks behind the first one have no embedding table."""
        return bool(self.of_kind(UnitKind.embed))

    @cached_property
    def head_bytes(self) -> int:
        """Of the LM head's own tensor: 0 when it is tied to the embedding table."""
        return sum(unit.stored_bytes for unit in self.of_kind(UnitKind.head))

    @property
    def lm_head(self) -> UnitSpec:
        """What the LM head multiplies by, tied or not."""
        (unit,) = self.of_kind(UnitKind.embed if self.tied else UnitKind.head)
        return unit

    @property
    def lm_head_bytes(self) -> int:
        """Of what the LM head multiplies by, tied or not."""
        return self.lm_head.stored_bytes

    @cached_property
    def weight_bytes(self) -> int:
        """Of all weights, each stored tensor once."""
        return sum(unit.count * unit.stored_bytes for unit in self.units)

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        elements = 2 * self.kv_width * self.layers if self.kv_elements is None else self.kv_elements
        return elements * self.kv_dtype.nbytes

    @property
    def kv_moves(self) -> bool:
        """Whether K and V may lie outside the compute device, or be kept for prompts to come: every layer keeps as much of a token, and
        nothing else."""
        return not self.kv_stays_because

    @property
    def kv_stays_because(self) -> str:
        """Why it may not; empty where it may."""
        if self.model_type in OWN_ATTENTION:
            return f"{self.model_type} models attend by code of their own"
        if self.state_bytes:
            return "some layers keep a state that cannot be taken back to an earlier token"
        return "" if self.kv_elements is None else "layers keep different amounts of it"

    def multiplied_bytes(self, tokens: int) -> float:
        """Weights that the products of one pass over ``tokens`` tokens read: all blocks, of routed experts those touched, the LM head."""
        e = self.experts
        routed = len(e.layers) * touched_experts(e, tokens) * e.expert_bytes if e else 0
        return sum(self.attn_bytes) + sum(self.ffn_bytes) + routed + self.lm_head_bytes

    @cached_property
    def flops_per_token(self) -> float:
        """Multiply-adds × 2 of one token through every layer and the LM head, attention scores left out."""
        blocks = sum(unit.elements for kind in (UnitKind.attn, UnitKind.ffn) for unit in self.of_kind(kind))
        touched = touched_experts(self.experts, 1) if self.experts else 0.0
        return 2 * (blocks + touched * sum(unit.elements for unit in self.of_kind(UnitKind.expert)) + self.lm_head.elements)

    def attention_flops(self, context: float) -> float:
        """FLOPs of one token's attention over ``context`` tokens, all layers: QK^T and PV, 2 each per element."""
        return 4 * self.attn_width * context * self.layers


def touched_experts(experts: Experts, tokens: int) -> float:
    """Experts of one layer that ``tokens`` tokens visit: all of :func:`touched_by_rank`."""
    return sum(touched_by_rank(experts, tokens))


@lru_cache(maxsize=64)
def _decoded(model: ModelSpec, kinds: frozenset[UnitKind]) -> ModelSpec:
    return replace(model, units=tuple(unit.decoded if unit.kind in kinds else unit for unit in model.units))


@lru_cache(maxsize=256)
def touched_by_rank(experts: Experts, tokens: int) -> tuple[float, ...]:
    """[experts]: how likely any of ``tokens`` tokens visits the expert that the n-th slot of a layer would keep:

        1 - (1 - p)**tokens,   p = top_k * (hit_rates[n] - hit_rates[n - 1])

    What one token often finds again is what many choose. Rows of different prompts of a trained Mixtral (8 experts, top-2) visit 2.96,
    4.01, 4.91 and 5.56 experts with 2, 4, 8 and 16 rows. This law says 2.94, 3.89, 4.76 and 5.53; an even router's would be 3.5, 5.5, 7.2
    and 7.9. O(experts), kept for the next time.
    """
    chances = (min(1.0, experts.top_k * (after - before)) for before, after in pairwise(experts.hit_rates))
    return tuple(1 - (1 - max(0.0, chance)) ** tokens for chance in chances)
