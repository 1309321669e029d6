"""Bytes of what plans deal in, and what every run takes beside it: units and slots, KV pages, activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.planner.common.measures import ALIGN, align_up
from penstock.planner.contract.decided.decisions import KvPages
from penstock.planner.contract.decided.placement import Placement
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import Experts, ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.ranks.rank_chain import told_bytes
from penstock.planner.contract.speculation.verify_shapes import VerifyShape


@dataclass(frozen=True)
class Overheads:
    """Bytes beyond weights and KV that every run takes."""

    cuda_workspace_bytes: int = 64 * 2**20
    """cuBLAS and cuBLASLt workspaces: 32 MiB each on Hopper, less on older devices (cuBLAS documentation)."""
    cpu_workspace_bytes: int = 72 * 2**20
    """Scratch of the CPU's matrix library for one layer at a time."""
    cpu_kernels: int = 32
    """Compiled matrix kernels that oneDNN keeps, and its PyTorch binding once more. A decoder has fewer than ten shapes of weights."""
    cpu_kernel_bytes: int = 700_000
    """One of them with AVX-512, measured: routed experts fill both caches, since each layer and prompt brings other numbers of rows."""
    allocator_holes: float = 0.25
    """Room for holes in torch's allocator on a card, as a share of a prefill's activations. Blocks of different sizes then find a place
    without asking the driver. An 8B geometry on an H200 needs 0.10 to 0.22 with 2048 to 16384 tokens; with less, passes take 8 to 12 %
    longer."""
    host_workspace_bytes: int = 64 * 2**20
    """With a GPU: the interpreter's growth while it runs (events, views, buffers of the driver), measured on an H100."""
    bounce_bytes: int = 64 * 2**20
    """With a GPU: page-locked buffers that VRAM's residents pass through at start."""
    unit_padding_bytes: int = 2 * 4096
    """A unit is read in place by O_DIRECT from an offset that is not page-aligned in its file: a page at either end."""
    tables_padding_bytes: int = 4 * 4096
    """The same for the embedding table and the LM head."""
    pieces_padding_bytes: int = 4 * 4096
    """More of the same for a layer that lies in several pieces: its shard ended, or its experts are put together."""
    outside_per_layer: int = 4
    """Tensors of a decoder layer outside its two blocks, at most: the norms of Gemma. The runtime places each one in pages of its own."""
    kv_pool_spreads: float = 2.0
    """A server's pool is short in one moment of forty. A row then gives its pages up."""
    kv_ring_slots: int = 3
    """One layer's KV is read by attention, the next one's has arrived, a third one's is in transit."""
    kv_bounce_pages: int = 2
    """Pages of VRAM that kept pages pass through, each with all layers in one copy. One is scattered to its layers while the next arrives.
    Scattering takes a tenth of the copy's time at most, so the link does not wait."""
    kv_segment_bytes: int = 256 * 2**20
    """Bytes of a file of kept pages. Eviction on the SSD is by the file, so two files come on top of the kept set: the one being written
    and the one being evicted."""
    norm_float32_copies: int = 2
    """RMSNorm upcasts its input to float32 and multiplies it into a second float32 tensor."""
    float32_bytes: int = 4
    recorded_bytes: int = 16 * 2**20
    """Of a card, for each recorded pass that verifies, beside its activations: the driver's copy of its kernels, and the parts that
    attention cuts a row's keys into, 2 * 132 processors * 64 lines * (128 + 2) * 4 bytes on an H100. Counted, not measured."""
    hidden_in_parts: int = 4
    """Hidden states of a whole pass that lie beside its parts."""


OVERHEADS = Overheads()


def dram_workspace_bytes(hardware: HardwareProfile, model: ModelSpec) -> int:
    """DRAM that a run takes beside what the plan places."""
    if hardware.gpu:
        return OVERHEADS.host_workspace_bytes + OVERHEADS.bounce_bytes
    return OVERHEADS.cpu_workspace_bytes + (2 * OVERHEADS.cpu_kernels * OVERHEADS.cpu_kernel_bytes if model.experts else 0)


def scratch_bytes(model: ModelSpec) -> int:
    """What coded matrices are decoded into, one after the other, where the model computes: whole pages; none where nothing is coded."""
    return align_up(model.scratch_bytes)


def unit_vram_bytes(unit_bytes: int) -> int:
    """VRAM of one unit, resident or in its ring slot: whole pages, and those between two runs of a file, which come in one copy; 0 bytes
    take nothing."""
    return align_up(unit_bytes) + OVERHEADS.unit_padding_bytes if unit_bytes else 0


def unit_dram_bytes(unit_bytes: int) -> int:
    """DRAM of one unit in the layer cache: whole pages and the padding of an in-place O_DIRECT read; 0 bytes take nothing."""
    return align_up(unit_bytes) + OVERHEADS.unit_padding_bytes if unit_bytes else 0


def dram_slot_bytes(placement: Placement) -> int:
    """One slot of the DRAM cache: it fits any layer's units that pass through DRAM, each with its padding."""
    return max((sum(unit_dram_bytes(n) for n in _through_dram(placement, i)) for i in placement.dram_layers), default=0)


def _through_dram(placement: Placement, layer: int) -> list[int]:
    tiers = ((placement.attn, placement.model.attn_bytes), (placement.ffn, placement.model.ffn_bytes))
    return [sizes[layer] for tier, sizes in tiers if tier[layer] != "vram"]


def expert_vram_bytes(experts: Experts) -> int:
    """One slot of VRAM for an expert: whole pages."""
    return unit_vram_bytes(experts.expert_bytes)


def expert_dram_bytes(experts: Experts) -> int:
    """One slot of DRAM for an expert: whole pages, and the padding of each of the three tensors that it is put together from."""
    return unit_dram_bytes(experts.expert_bytes) + OVERHEADS.pieces_padding_bytes


def ring_bytes(placement: Placement) -> int:
    """VRAM of all ring slots."""
    return sum(slots * unit_vram_bytes(size) for slots, size in placement.ring_classes.values())


def kv_page_bytes(model: ModelSpec, page_tokens: int) -> int:
    """One KV page: K and V of ``page_tokens`` tokens in one layer."""
    return page_tokens * model.kv_bytes_per_token // model.layers


def kv_layer_bytes(model: ModelSpec, kv: KvPages) -> int:
    """K and V of one layer for all sequences of a batch at their end."""
    return kv.pages // model.layers * kv_page_bytes(model, kv.page_tokens)


def kv_ring_slots(model: ModelSpec, kv: KvPages) -> int:
    """VRAM slots that streamed layers' KV passes through, one layer each; none when all of it stays in VRAM."""
    outside = (kv.dram_pages + kv.ssd_pages) * model.layers // max(1, kv.pages)
    return min(OVERHEADS.kv_ring_slots, outside)


def kv_staging_slots(model: ModelSpec, kv: KvPages) -> int:
    """DRAM slots that the KV of the SSD's layers passes through, one layer each."""
    return min(OVERHEADS.kv_ring_slots, kv.ssd_pages * model.layers // max(1, kv.pages))


def kv_arena_slots(hardware: HardwareProfile, model: ModelSpec, kv: KvPages) -> int:
    """Buffers of one layer's KV in a run's arena: with a GPU one for each layer in DRAM, and those that the SSD's layers pass through."""
    in_dram = kv.dram_pages * model.layers // max(1, kv.pages) if hardware.gpu else 0
    return in_dram + kv_staging_slots(model, kv)


def kept_page_bytes(model: ModelSpec, page_tokens: int) -> int:
    """One page that is kept for prompts to come: K and V of ``page_tokens`` tokens in all layers, from an aligned address on."""
    return align_up(model.layers * kv_page_bytes(model, page_tokens))


def kept_file_bytes(model: ModelSpec, page_tokens: int, pages: int) -> int:
    """SSD space in which ``pages`` stay: each with a header, and room for the files that come and go."""
    records = pages * (ALIGN + kept_page_bytes(model, page_tokens))
    return records + min(records, 2 * OVERHEADS.kv_segment_bytes)


def kept_file_pages(model: ModelSpec, kv: KvPages) -> int:
    """Pages that stay on the SSD: the most of which ``kept_file_bytes`` are no more than the plan's."""
    record, nbytes = ALIGN + kept_page_bytes(model, kv.page_tokens), kv.reuse.ssd_bytes
    return max(nbytes // 2, nbytes - 2 * OVERHEADS.kv_segment_bytes) // record


def kv_bounce_bytes(model: ModelSpec, kv: KvPages) -> int:
    """VRAM that pages from the other tiers pass through; none where all pages stay in VRAM."""
    outside = kv.reuse.dram_pages or kv.reuse.ssd_bytes
    return OVERHEADS.kv_bounce_pages * kept_page_bytes(model, kv.page_tokens) if outside else 0


def pages_per_sequence(workload: Workload, page_tokens: int) -> int:
    """KV pages that one sequence has room for."""
    return -(-workload.max_tokens // page_tokens)


def pool_pages(workload: Workload, batch: int, page_tokens: int) -> int:
    """KV pages in which ``batch`` sequences live, each of all layers.

    A batch has room for all of them at their ends. A server's rows are at all stages. With means P and N of prompt and reply, and the
    spread s of both, a row that lives has, its reply being one of those that last,

        mean     = P + N * (1 + s^2) / 2
        variance = (s * P)^2 + N^2 * ((1 + s^2)^3 / 3 - (1 + s^2)^2 / 4)

    tokens. The pool has room for ``OVERHEADS.kv_pool_spreads`` standard deviations above the mean of all rows, for what pages round up
    and the page that each row goes on with, and for one sequence of any length.
    """
    each = pages_per_sequence(workload, page_tokens)
    if not workload.is_served:
        return batch * each
    prompt, new, wide = workload.prompt_tokens, workload.new_tokens, 1 + workload.length_spread**2
    mean = prompt + new * wide / 2
    variance = (wide - 1) * prompt**2 + new**2 * (wide**3 / 3 - wide**2 / 4)
    tokens = batch * mean + OVERHEADS.kv_pool_spreads * math.sqrt(batch * variance)
    return min(batch * each, max(each, math.ceil(tokens / page_tokens + batch * 1.5)))


def activation_bytes(model: ModelSpec, workload: Workload, batch: int, chunk_tokens: int, part_tokens: int = 0) -> int:
    """Peak bytes of activations of one pass over ``batch`` × ``chunk_tokens`` tokens, the logits of the last tokens included. A server's
    pass has ``chunk_tokens`` of prompts beside ``batch`` rows.

    The embeddings, which transformers keep alive, the residual, and the largest of three phases of a decoder layer:

    * a norm in float32;
    * attention, with rotary temporaries, K and V of one layer repeated over the query heads, and the mask;
    * the gated FFN, with gate, up and product.

    From the forward passes of ``transformers`` v5 with SDPA attention. An 8B geometry on an H100 took 61 MB for 512 tokens, 3910 MB for
    32768. One sequence or many made no difference. Only a chunk that follows other tokens of its prompt needs a mask. A pass of whole
    prompts has none, since every row is computed by itself.

    A pass in parts of ``part_tokens`` has those phases for one part at a time, each part behind other tokens of its prompt. Beside them lie
    hidden states of the whole pass: embeddings, what a layer made, its parts put together, and those on their way to the next rank.
    """
    dtype, f32 = model.compute_dtype.nbytes, OVERHEADS.float32_bytes
    served = workload.is_served
    tokens = batch + chunk_tokens if served else min(chunk_tokens, workload.prompt_tokens)
    attention, other = _token_bytes(model)
    repeated = 2 * model.attn_width if model.attn_width > model.kv_width else 0
    one_layer_kv = (repeated * dtype + 2 * model.kv_width * model.kv_dtype.nbytes) * workload.max_tokens
    together = workload.together(batch)
    in_parts = bool(part_tokens) and part_tokens < together * tokens
    masked = served or in_parts or tokens < workload.longest_prompt
    mask = workload.max_tokens * (1 + dtype) if masked else 0
    gathered = model.vocab if model.dealt is None or model.dealt.rank else model.dealt.vocab
    logits = batch * gathered * (dtype + f32)
    if in_parts:
        kept = together * tokens * OVERHEADS.hidden_in_parts * model.hidden * dtype
        rows = -(-part_tokens // tokens)
        return kept + max(part_tokens * other, part_tokens * (attention + mask) + rows * one_layer_kv) + logits
    return together * max(tokens * other, tokens * (attention + mask) + one_layer_kv) + logits


def _token_bytes(model: ModelSpec) -> tuple[int, int]:
    """Activations of one token in a layer, at most: in attention, and in norms or the FFN."""
    dtype = model.compute_dtype.nbytes
    norm = 3 * model.hidden * dtype + OVERHEADS.norm_float32_copies * model.hidden * OVERHEADS.float32_bytes
    qkv = model.attn_width + 2 * model.kv_width
    rotary = 2 * model.attn_width + model.kv_width
    attention = (3 * model.hidden + qkv + max(rotary, model.attn_width)) * dtype
    routed = _experts_bytes_per_token(model.experts, model) if model.experts else 0
    return attention, max(norm, 4 * model.hidden * dtype + max(routed, model.has_dense and 3 * model.ffn_width * dtype))


def recorded_bytes(model: ModelSpec, shapes: Sequence[VerifyShape]) -> int:
    """VRAM of passes of ``shapes`` that are recorded to verify. They share the activations of the largest, which lie apart from those of
    prompts; each has its own logits, which it leaves behind."""
    most = max((shape.all_tokens for shape in shapes), default=0)
    each = (shape.all_tokens * model.vocab * model.compute_dtype.nbytes + OVERHEADS.recorded_bytes for shape in shapes)
    return round((1 + OVERHEADS.allocator_holes) * most * max(_token_bytes(model))) + sum(each)


def recorded_prompt_bytes(model: ModelSpec, tokens: int) -> int:
    """VRAM of layers recorded for ``tokens`` of a prompt around their attention: activations of one layer, which all have in turn."""
    if not tokens:
        return 0
    return round((1 + OVERHEADS.allocator_holes) * tokens * max(_token_bytes(model))) + OVERHEADS.recorded_bytes


def card_activation_bytes(model: ModelSpec, workload: Workload, batch: int, chunk_tokens: int, part_tokens: int = 0) -> int:
    """``activation_bytes`` with what a card's allocator needs to place them."""
    return round((1 + OVERHEADS.allocator_holes) * activation_bytes(model, workload, batch, chunk_tokens, part_tokens))


def _experts_bytes_per_token(experts: Experts, model: ModelSpec) -> int:
    """Activations of a layer's routed experts for one token, if experts are computed one after the other.

    A row of ``hidden`` for each of the token's ``top_k`` experts waits for the sum of all; an int64 index a row says which is whose. Beside
    them lies the larger of

    * the expert that computes, at worst with every token: gathered hidden states, gate and up in one tensor, the activated gate, and the
      product or the row brought back down. One expert's width is taken as ``ffn_width`` / ``top_k``;
    * at the end, every row weighted in float32, and their sum.

    Of sliced experts there are besides what the layer's rank tells, what another one made, and the sum of all in float32.
    """
    top_k, width, hidden = experts.top_k, -(-model.ffn_width // (experts.top_k * model.slices)), model.hidden
    dtype = model.compute_dtype.nbytes
    computing = max(4 * width + hidden, 3 * width + 2 * hidden) * dtype
    summing = (top_k + 1) * hidden * OVERHEADS.float32_bytes + hidden * dtype
    shared = told_bytes(model) + hidden * (dtype + OVERHEADS.float32_bytes) if model.slices > 1 else 0
    return top_k * hidden * dtype + max(computing, summing) + 8 * top_k + shared
