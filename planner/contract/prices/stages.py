"""Rates of the links, and seconds of compute."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.decided.recording import are_tabled, can_record, staged_bytes
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.given.hardware import Gpu, HardwareProfile
from penstock.planner.contract.given.model import Experts, ModelSpec, touched_experts
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.prices.decoding import beyond_stored_s, model_decode_s, unit_s
from penstock.planner.contract.prices.launches import (
    asked_issue_s,
    expert_launches,
    issue_s,
    pieces_issue_s,
    prompt_operations,
    step_issue_s,
)


class Stage(StrEnum):
    """What a run's clock tells apart."""

    ssd = "ssd"
    h2d = "h2d"
    d2h = "d2h"
    compute = "compute"
    """Of the card or, without one, of the CPU."""


@dataclass(frozen=True)
class FixedCosts:
    """Seconds and weights that no transfer explains."""

    embedding_lookup_s: float = 50e-6
    """One pass with the embedding table in DRAM: token ids to the host, rows gathered, rows to the device. Two small PCIe
    copies and a synchronize, 10-20 microseconds each, and the gather."""
    embedding_rows_share: float = 0.75
    """Of the link's rate, by which a kernel gathers embedding rows in DRAM: 40 to 49 GB/s on an H100, busy and idle, 2048 and
    32,768 rows of 16 KB. By 2.5 GB/s, as was counted before, prompts of 32,768 tokens were promised 5 to 6 % too slow on four hosts."""
    ssd_reads_per_s: float = 4000.0
    """Most reads a second. Each costs the interpreter some 50 microseconds, which delays the thread that launches kernels: 8,500 a second
    doubled a step on an H100. Faster drives need larger blocks."""
    imports_s: float = 4.0
    """Importing torch and transformers, at least: 4 s on the fastest machine tried, 8 to 18 on the others."""
    first_kernels_s: float = 0.6
    """Seconds of the first pass over a model on a GPU, which loads its kernels: 0.5 to 0.6 with an 8B geometry on an H200."""
    first_kernels_share: float = 0.09
    """The same in seconds of the imports, once those are known: both read and run a great many files. On an H100 whose imports took 16.0,
    16.8 and 19.1 s they were 1.42, 1.71 and 1.59."""
    first_passes: int = 3
    """Without a GPU, passes of one token that are rehearsed while weights are read."""
    cpu_dense_rows: int = 256
    """Rows at which a CPU's matrix rate is measured."""
    cpu_packing_rows: float = 80.0
    """The CPU's matrix library packs the weights once a product. That takes as long as so many rows: with oneDNN and BF16 on 2 cores, 29.0
    ms for 128 rows of 4096 x 4096 and 46.9 ms for 256."""
    prompt_layer_s: float = 8e-5
    """Seconds by which a layer of a prompt takes a card longer than its products, than what its kernels between them move, and than
    ``Gpu.layer_kernels_s``: kernels wait for each other. Fitted to 8B on H100s, 2048 tokens: one card took 56.0 ms, two 35.6 in parts of
    1024, four 24.0 in parts of 512 (docs/log.md, 2026-11-28)."""
    ttft_decode_weight: float = 1e-3
    """Weight of the decode phase when the objective is time to first token: it only breaks ties."""


FIXED = FixedCosts()


def ssd_gbps(hardware: HardwareProfile, block_bytes: int, queue_depth: int) -> float:
    """SSD read rate of ``queue_depth`` reads of ``block_bytes``, never more than measured, nor more than the interpreter can ask for. It is
    the curve over block size at the nearest measured depth not above it. Below the smallest measured block or depth it falls in
    proportion."""
    depths = sorted({p.queue_depth for p in hardware.ssd_read})
    depth = max((d for d in depths if d <= queue_depth), default=depths[0])
    points = sorted((p.block_bytes, p.gbps) for p in hardware.ssd_read if p.queue_depth == depth)
    rate = Curve(tuple(points)).at(block_bytes) * min(1.0, queue_depth / depth, block_bytes / points[0][0])
    return min(rate, block_bytes * FIXED.ssd_reads_per_s / GB)


def answer_s(hardware: HardwareProfile, block_bytes: int, queue_depth: int, nbytes: float = math.inf) -> float:
    """Seconds by which reading ``nbytes`` takes longer than their share of a stream when nothing was in flight before:

        block / rate of single reads - block / rate of queue_depth reads

    0 where single reads were not measured."""
    if not any(p.queue_depth == 1 for p in hardware.ssd_read):
        return 0.0
    alone, many = (ssd_gbps(hardware, block_bytes, depth) for depth in (1, queue_depth))
    return min(block_bytes, nbytes) / GB * max(0.0, 1 / alone - 1 / many)


def late_read_s(hardware: HardwareProfile, model: ModelSpec, block_bytes: int, queue_depth: int) -> float:
    """Seconds by which a layer's visit of experts that the SSD has takes longer than these are in transit: the drive's answer, and the
    host's way to it and back. Nobody can ask before the router has spoken."""
    if model.experts is None:
        return 0.0
    return answer_s(hardware, block_bytes, queue_depth, model.experts.expert_bytes) + asked_issue_s(hardware)


def h2d_gbps(gpu: Gpu, nbytes: float, chunk_bytes: int) -> float:
    """Host-to-device rate of ``nbytes`` in copies of at most ``chunk_bytes``, with nothing else on the way.

    The host issues a copy while the one before it is on the way, so a copy takes

        seconds = max(bytes / rate, copy_s)

    where ``copy_s`` is what it costs the host (:class:`Gpu`). Nothing, of a layer without one of its blocks, has a whole chunk's rate."""
    piece = min(nbytes, chunk_bytes) or chunk_bytes
    rate = gpu.h2d.at(piece)
    return min(rate, piece / gpu.copy_s / GB) if gpu.copy_s else rate


def expert_copy_s(gpu: Gpu, experts: Experts, chunk_bytes: int) -> float:
    """Seconds to copy one expert to the device in chunks."""
    return experts.expert_bytes / h2d_gbps(gpu, experts.expert_bytes, chunk_bytes) / GB


def lookup_s(hardware: HardwareProfile, model: ModelSpec, rows: int, passes: int) -> float:
    """Seconds in which a card looks up ``rows`` tokens in an embedding table in DRAM, in so many passes."""
    assert hardware.gpu is not None, "without a card the table is near"
    gbps = FIXED.embedding_rows_share * hardware.gpu.h2d.peak
    return passes * FIXED.embedding_lookup_s + rows * model.embed_row_bytes / gbps / GB


def weight_pass_s(hardware: HardwareProfile, model: ModelSpec, tokens: int, more: float = 0) -> float:
    """Compute seconds of one pass with ``tokens`` tokens, without FLOPs and attention: every active weight is read once, and every layer is
    launched, with ``more`` operations than in a decode step. A GPU reads while the host launches. On the CPU the same threads do one
    after the other."""
    read_s, issued_s = weight_read_s(hardware, model, tokens), issue_s(hardware, model, tokens, more)
    return max(read_s, issued_s) if hardware.gpu else read_s + issued_s


def weight_read_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Seconds to read every active weight of one pass once from where it is computed with, and to decode what is coded."""
    return model.multiplied_bytes(tokens) / hardware.weight_gbps / GB + beyond_stored_s(hardware, model, tokens)


def launched_meanwhile_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Seconds of one layer of a pass over ``tokens`` tokens in which the host launches what comes behind a router, while experts that the
    layer misses are on their way: all that a step recorded in pieces launches, nothing where its experts are recorded, too, else what takes
    longer than reading the weights. 0 for a dense model. Of sliced experts all ranks wait at once, and the one whose layer comes next has
    it launched by then: what ranks launch for each other's layers comes when they are told."""
    own = model.in_turn if model.moe else model
    if hardware.gpu is None or own.experts is None:
        return 0.0
    layers = len(own.experts.layers)
    if can_record(hardware, model):
        return 0.0 if are_tabled(model, tokens) else pieces_issue_s(hardware, own, tokens) / layers
    return max(0.0, issue_s(hardware, own, tokens) - weight_read_s(hardware, own, tokens)) / layers


def expert_step_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Seconds of the card's for one of the routed experts that a layer of a decode step over ``tokens`` tokens uses, its launches with
    them."""
    if model.experts is None:
        return 0.0
    unit, rows = model.of_kind(UnitKind.expert)[0], max(1.0, tokens * model.experts.top_k / touched_experts(model.experts, tokens))
    return unit_s(hardware, unit, rows) + expert_launches(hardware, model, tokens) * launched_meanwhile_s(hardware, model, tokens)


def between_experts_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Seconds of the card's between two layers' routed experts in such a step, launches apart: reading all other weights, on average."""
    if model.experts is None:
        return 0.0
    unit, u = model.of_kind(UnitKind.expert)[0], touched_experts(model.experts, tokens)
    experts_s = len(model.experts.layers) * u * unit_s(hardware, unit, max(1.0, tokens * model.experts.top_k / u))
    return max(0.0, weight_read_s(hardware, model, tokens) - experts_s) / model.layers


def decode_compute_s(hardware: HardwareProfile, model: ModelSpec, workload: Workload, batch: int, kernels_s: float = 0.0) -> float:
    """Compute seconds of one decode step at the mean context. ``kernels_s``: see :func:`step_compute_s`."""
    return step_compute_s(hardware, model, workload.prompt_tokens + workload.new_tokens / 2, batch, kernels_s)


def recorded_s(hardware: HardwareProfile, model: ModelSpec, context: float, batch: int) -> float:
    """Compute seconds of one decode step that the host launches at once, over ``context`` tokens a sequence; infinite where a machine
    records none. Where it is recorded up to each layer's experts, the host waits for routers and the card for the host: both add up."""
    gpu = hardware.gpu
    if gpu is None or not gpu.layer_kernels_s:
        return math.inf
    read_s = step_compute_s(replace(hardware, layer_launch_s=0.0), model, context, batch)
    return read_s + layers_beside_s(hardware, model, batch) + pieces_issue_s(hardware, model, batch) + step_issue_s(hardware, model)


def layers_beside_s(hardware: HardwareProfile, model: ModelSpec, batch: int) -> float:
    """Of a recorded step what its layers take beside products and launches, each as much: kernels, and experts that are copied to one
    place, which reads and writes each once."""
    staged_s = 0.0 if model.experts is None else len(model.experts.layers) * 2 * staged_bytes(model, batch) / hardware.weight_gbps / GB
    return staged_s + (model.layers * hardware.gpu.layer_kernels_s if hardware.gpu else 0.0)


def step_compute_s(hardware: HardwareProfile, model: ModelSpec, context: float, batch: int, kernels_s: float = 0.0) -> float:
    """Compute seconds of one decode step over ``context`` tokens a sequence: weights or FLOPs, whichever is slower, and the KV cache
    read. ``kernels_s``: of each layer's kernels beside its products. Launching them one by one takes longer, so they count where launches
    are hidden."""
    flops_s = batch * _token_s(hardware, model.flops_per_token, model.attention_flops(context)) + model_decode_s(hardware, model, batch)
    kv_s = attended_s(hardware, model, batch * context)
    return max(weight_pass_s(hardware, model, batch) + kv_s, flops_s) + model.layers * kernels_s


def attended_s(hardware: HardwareProfile, model: ModelSpec, tokens: float) -> float:
    """Seconds in which rows of one token attend to K and V of ``tokens`` where they are computed with, in all layers. A card reads them at
    its memory's rate, and so does the CPU where it multiplies coded weights as they are stored. Else torch attends there, one query head
    after the other, at the rate that the probe found."""
    ours = any(unit.format.host_rows for unit in model.coded)
    if hardware.gpu is not None or ours or not hardware.cpu_attention_gbps:
        return tokens * model.kv_bytes_per_token / hardware.weight_gbps / GB
    repeated_bytes = 2 * model.attn_width * model.kv_dtype.nbytes * model.layers
    return tokens * repeated_bytes / hardware.cpu_attention_gbps / GB


@dataclass(frozen=True)
class MixedPass:
    """One pass that carries rows and prompts."""

    rows: int
    """Sequences that decode."""
    context: float
    """Tokens of each of them, on average."""
    tokens: int
    """Of prompts, all together."""
    seen: float
    """Tokens that each of these attends to, on average: half of its own part, and all before."""
    before: float = 0.0
    """Tokens before the parts, all together."""
    drafted: int = 0
    """Behind the newest tokens of the rows, all together."""

    @property
    def all_tokens(self) -> int:
        """That are computed."""
        return self.rows + self.drafted + self.tokens

    @property
    def undrafted(self) -> MixedPass:
        """With a row for each draft. KV is read once a sequence, so such rows have that much less of it."""
        rows = self.rows + self.drafted
        return replace(self, rows=rows, context=self.context * self.rows / max(1, rows), drafted=0)


def mixed_compute_s(hardware: HardwareProfile, model: ModelSpec, mixed: MixedPass, kernels_s: float = 0.0) -> float:
    """Compute seconds of a pass that carries prompts, by the laws of both phases: FLOPs and what lies between products add up, weights are
    read once. ``mixed.tokens`` is 1 or more. Without rows it is a pass of :func:`prefill_compute_s`, as far as ``kernels_s`` goes, too."""
    head_flops, many = 2 * model.lm_head.elements, mixed.all_tokens
    flops_s = mixed.rows * _token_s(hardware, model.flops_per_token, model.attention_flops(mixed.context))
    flops_s += mixed.tokens * _token_s(hardware, model.flops_per_token - head_flops, model.attention_flops(mixed.seen))
    flops_s += head_flops / hardware.dense_tflops / 1e12
    pass_s = weight_pass_s(hardware, model, many, more_operations(hardware, mixed))
    pass_s += attended_s(hardware, model, mixed.rows * mixed.context)
    return _with_products(hardware, model, flops_s, pass_s, 1, many, mixed.tokens, kernels_s)


def more_operations(hardware: HardwareProfile, mixed: MixedPass) -> int:
    """Of a layer, beyond those of a decode step."""
    return prompt_operations(hardware, bool(mixed.rows or mixed.before))


def _with_products(
    hardware: HardwareProfile,
    model: ModelSpec,
    flops_s: float,
    passes_s: float,
    passes: int,
    rows: int,
    prompt_tokens: int,
    kernels_s: float,
) -> float:
    """Of ``passes`` over ``rows`` tokens each, ``prompt_tokens`` of prompts in all. A GPU's matrix products wait for the operations between
    them (:func:`between_products_s`). Where launches are hidden, reading weights waits for ``kernels_s`` a layer. A CPU's products pack the
    weights first."""
    if hardware.gpu:
        flops_s += passes * model_decode_s(hardware, model, rows)
        return max(flops_s + between_products_s(hardware, model, prompt_tokens, passes), passes_s + passes * model.layers * kernels_s)
    return flops_s * packed(rows) + passes_s


def packed(rows: int) -> float:
    """How many times as long a CPU's products of ``rows`` rows take as at the rate that was measured: it packs the weights first."""
    return (1 + FIXED.cpu_packing_rows / rows) / (1 + FIXED.cpu_packing_rows / FIXED.cpu_dense_rows)


def _token_s(hardware: HardwareProfile, product_flops: float, attention_flops: float) -> float:
    return product_flops / hardware.dense_tflops / 1e12 + attention_flops / hardware.attention_tflops / 1e12


def burst_saves_s(hardware: HardwareProfile, flops_s: float, after_s: float) -> float:
    """What a card saves of ``flops_s`` of products that begin ``after_s`` behind its rest: for ``burst_s`` it multiplies faster, until its
    power holds the clocks back."""
    gpu = hardware.gpu
    if gpu is None or gpu.burst_tflops <= gpu.dense_tflops:
        return 0.0
    faster = gpu.burst_tflops / gpu.dense_tflops
    return min(flops_s, faster * max(0.0, gpu.burst_s - after_s)) * (1 - 1 / faster)


def between_products_s(hardware: HardwareProfile, model: ModelSpec, tokens: int, passes: int) -> float:
    """Seconds of a card between the matrix products of ``tokens`` tokens of prompts, in so many passes: what its memory moves, and, with
    the run's own kernels, what each layer of a pass takes besides."""
    gpu = hardware.gpu
    assert gpu is not None
    moved_s = tokens * elementwise_bytes_per_token(model, bool(gpu.layer_kernels_s)) / gpu.memory_gbps / GB
    return moved_s + (passes * model.layers * (gpu.layer_kernels_s + FIXED.prompt_layer_s) if gpu.layer_kernels_s else 0.0)


def elementwise_bytes_per_token(model: ModelSpec, fused: bool) -> int:
    """Bytes that one token's pass moves through the device's memory outside matrix products, all layers.

    Elements read and written in a Llama-like layer, tensor by tensor. In the run's own kernels (``fused``; runtime/model/fused):

    * two RMSNorms, 2 each, the sums before and behind the second one, 2 and 3, of ``hidden``;
    * SiLU and the gated product, 3 of ``ffn_width``;
    * rotary embedding, 2 of the query and key widths;
    * K and V written to the cache, 4 of ``kv_width``.

    In the eager forward of ``transformers`` v5:

    * two RMSNorms in float32, 18 each, and two residual sums, 3 each, of ``hidden``;
    * SiLU and the gated product, 5 of ``ffn_width``;
    * rotary embedding, 10 of the query and key widths;
    * the attention's output made contiguous, 2;
    * K and V written to the cache, 4 of ``kv_width``.
    """
    hidden, ffn, attn, kv = (9, 3, 2, 6) if fused else (42, 5, 12, 14)
    elements = hidden * model.hidden + ffn * model.ffn_width + attn * model.attn_width + kv * model.kv_width
    return elements * model.compute_dtype.nbytes * model.layers


def prefill_compute_s(
    hardware: HardwareProfile,
    model: ModelSpec,
    workload: Workload,
    batch: int,
    chunk_tokens: int,
    start: int = 0,
    kernels_s: float = 0.0,
    more: float = 0,
    after_s: float = 0.0,
) -> float:
    """Compute seconds of the prefill from token ``start`` on, in passes of ``chunk_tokens`` per sequence. The LM head sees each last token
    alone; attention sees all tokens before its own. ``kernels_s``: what a layer's kernels beside its products take at least, where their
    launches are hidden. ``more``: operations of a layer beside a whole pass's. ``after_s``: for how long the device has computed since it
    rested."""
    prompt = workload.prompt_tokens
    tokens = prompt - start
    head_flops = 2 * model.lm_head.elements
    per_token_s = _token_s(hardware, model.flops_per_token - head_flops, model.attention_flops((prompt + start) / 2))
    rows = batch * min(chunk_tokens, tokens)
    flops_s = batch * (tokens * per_token_s + head_flops / hardware.dense_tflops / 1e12)
    flops_s -= burst_saves_s(hardware, flops_s, after_s)
    first_s, other_s = (weight_pass_s(hardware, model, rows, more + prompt_operations(hardware, before)) for before in (False, True))
    passes = prefill_passes(workload, chunk_tokens, start)
    passes_s = passes * other_s + (0.0 if start else first_s - other_s)
    return _with_products(hardware, model, flops_s, passes_s, passes, rows, batch * tokens, kernels_s)


def last_part_share(hardware: HardwareProfile, model: ModelSpec, workload: Workload, chunk_tokens: int, parts: int, start: int) -> float:
    """What the last of a pass's ``parts`` computes for, of a mean part's seconds: its tokens attend to all before them."""
    mean, passed = (workload.prompt_tokens + start) / 2, min(chunk_tokens, workload.prompt_tokens - start)
    product_flops, last = model.flops_per_token - 2 * model.lm_head.elements, mean + passed * (1 - 1 / parts) / 2
    last_s, mean_s = (_token_s(hardware, product_flops, model.attention_flops(context)) for context in (last, mean))
    return last_s / mean_s


def prefill_issue_s(
    hardware: HardwareProfile, model: ModelSpec, workload: Workload, batch: int, chunk_tokens: int, start: int = 0, more: float = 0
) -> float:
    """Host seconds to launch all passes of that prefill; those behind the first token have more operations."""
    passes, rows = prefill_passes(workload, chunk_tokens, start), batch * min(chunk_tokens, workload.prompt_tokens - start)
    first_s, other_s = (issue_s(hardware, model, rows, more + prompt_operations(hardware, before)) for before in (False, True))
    return passes * other_s + (0.0 if start else first_s - other_s)


def prefill_passes(workload: Workload, chunk_tokens: int, start: int = 0) -> int:
    """Passes over the weights that a prompt takes from token ``start`` on."""
    return -(-(workload.prompt_tokens - start) // chunk_tokens)


def earlier_kv(workload: Workload, passes: int, start: int = 0) -> float:
    """Times that a sequence's KV at its end is read in the prefill's passes: each reads what was computed before it."""
    return (passes * start + (passes - 1) / 2 * (workload.prompt_tokens - start)) / workload.max_tokens


def kv_fill(workload: Workload) -> float:
    """Mean share of a sequence's KV pages that is in use while it decodes."""
    return (workload.prompt_tokens + workload.new_tokens / 2) / workload.max_tokens


def prompt_fill(workload: Workload) -> float:
    """Share of a sequence's KV pages that its prompt fills."""
    return workload.prompt_tokens / workload.max_tokens


def table_is_far(hardware: HardwareProfile, decisions: Decisions) -> bool:
    """Whether embedding rows are looked up over the link."""
    return hardware.gpu is not None and decisions.weights.embedding is Tier.dram
