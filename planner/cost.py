"""What a plan's decisions cost: seconds per stage and phase, and bytes per tier, from scratch and without side effects.

Each phase lasts as long as its slowest stage, since stages overlap: residents are spread evenly between streamed layers, so no
link waits for a run of the others. Without a GPU the SSD's DMA and the CPU's compute overlap the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from planner.decisions import Decisions, Tier
from planner.hardware import Curve, Gpu, HardwareProfile
from planner.memory import dram_use, kv_layer_bytes, kv_page_bytes, ssd_use, used_bytes, vram_use
from planner.model import ModelSpec
from planner.placement import Placement, place
from planner.units import GB
from planner.workload import Objective, Workload


class Stage(StrEnum):
    """What a byte or a FLOP waits for."""

    ssd = "ssd"
    h2d = "h2d"
    d2h = "d2h"
    compute = "compute"


@dataclass(frozen=True)
class FixedCosts:
    """Seconds and weights that no transfer explains."""

    embedding_lookup_s: float = 50e-6
    """One pass with the embedding table in DRAM: token ids to the host, rows gathered, rows to the device. Two small PCIe
    copies and a synchronize, 10-20 microseconds each, and the gather."""
    embedding_rows_gbps: float = 2.5
    """Rows of an embedding table in DRAM, read over the link by the kernel that gathers them: 2048 rows of 8 KB added 7 ms to a prefill
    and 8192 added 27 ms, on an H200."""
    ssd_reads_per_s: float = 4000.0
    """Most reads a second: each costs the interpreter some 50 microseconds, which the thread that launches kernels feels (8,500 a
    second doubled the time of a step on an H100). Faster drives want larger blocks."""
    imports_s: float = 4.0
    """Importing torch and transformers, at least: 4 s on the fastest machine tried, 8 to 18 on the others."""
    first_kernels_s: float = 0.6
    """On a GPU, the first pass over a model, which loads its kernels: 0.5 to 0.6 s with an 8B geometry on an H200."""
    first_passes: int = 3
    """Without a GPU, passes of one token that are rehearsed while weights are read."""
    cpu_dense_rows: int = 256
    """Rows at which a CPU's matrix rate is measured."""
    cpu_packing_rows: float = 80.0
    """The CPU's matrix library packs the weights once a product, which takes as long as this many rows: measured with oneDNN and BF16
    on 2 cores, 29.0 ms for 128 rows of 4096 x 4096 and 46.9 ms for 256."""
    ttft_decode_weight: float = 1e-3
    """Weight of the decode phase when the objective is time to first token: it only breaks ties."""


FIXED = FixedCosts()


@dataclass(frozen=True)
class Prediction:
    """What a plan promises. Stage seconds are sums over a phase; a phase lasts as long as its largest stage."""

    load_s: float
    """From the imports' end to the first request: filling the residents of every tier, page-locking, loading kernels. The page cache is
    taken to be cold; a run, which can look, predicts this figure anew."""
    ttft_s: float
    prefill_s: float
    decode_s_per_token: float
    """One decode step: a token for each sequence of the batch."""
    decode_tokens_per_s: float
    bottleneck_prefill: Stage
    bottleneck_decode: Stage
    ssd_bytes_per_token: int
    """Read from SSD per decode step."""
    h2d_bytes_per_token: int
    """Copied to the device per decode step."""
    vram_bytes: int
    dram_bytes: int
    ssd_bytes: int
    total_s: float
    """What the program minimises: see ``objective_weights``."""
    prefill_stages: dict[str, float]
    """Stage -> seconds over the whole prefill."""
    decode_stages: dict[str, float]
    """Stage -> seconds of one decode step."""


def ssd_gbps(hardware: HardwareProfile, block_bytes: int, queue_depth: int) -> float:
    """SSD read rate of ``queue_depth`` reads of ``block_bytes``, never more than measured: the curve over block size of the nearest
    measured depth not above it; below the smallest measured block or depth, the rate there in proportion. Nor
    more than the interpreter can ask for."""
    depths = sorted({p.queue_depth for p in hardware.ssd_read})
    depth = max((d for d in depths if d <= queue_depth), default=depths[0])
    points = sorted((p.block_bytes, p.gbps) for p in hardware.ssd_read if p.queue_depth == depth)
    rate = Curve(tuple(points)).at(block_bytes) * min(1.0, queue_depth / depth, block_bytes / points[0][0])
    return min(rate, block_bytes * FIXED.ssd_reads_per_s / GB)


def h2d_gbps(gpu: Gpu, nbytes: int, chunk_bytes: int) -> float:
    """Host-to-device rate of ``nbytes`` in copies of at most ``chunk_bytes``, with nothing else on the way."""
    return gpu.h2d.at(min(nbytes, chunk_bytes))


def h2d_loss(gpu: Gpu) -> float:
    """Seconds of copying that a second of SSD reading costs: both write or read the same DRAM. Near 0 beside one drive."""
    return max(0.0, 1 - gpu.h2d_while_ssd_gbps / gpu.h2d.peak)


def lookup_s(model: ModelSpec, rows: int, passes: int) -> float:
    """Seconds to look up ``rows`` tokens in an embedding table in DRAM, in so many passes."""
    return passes * FIXED.embedding_lookup_s + rows * model.hidden * model.dtype_bytes / FIXED.embedding_rows_gbps / GB


def weight_pass_s(hardware: HardwareProfile, model: ModelSpec, tokens: int) -> float:
    """Compute seconds of one pass with ``tokens`` tokens, FLOPs and attention left out: every active weight is read once and every layer
    issued. A GPU reads while the host issues; on the CPU the same threads do one after the other."""
    active = sum(model.attn_bytes) + sum(model.ffn_active_bytes(i, tokens) for i in range(model.layers)) + model.lm_head_bytes
    read_s, issue_s = active / hardware.weight_gbps / GB, model.layers * hardware.layer_launch_s
    return max(read_s, issue_s) if hardware.gpu else read_s + issue_s


def decode_compute_s(hardware: HardwareProfile, model: ModelSpec, workload: Workload, batch: int) -> float:
    """Compute seconds of one decode step at the mean context: weights or FLOPs, whichever is slower, and the KV cache read."""
    context = workload.prompt_tokens + workload.new_tokens / 2
    flops_s = batch * _token_s(hardware, model.flops_per_token, model.attention_flops(context))
    kv_s = batch * context * model.kv_bytes_per_token / hardware.weight_gbps / GB
    return max(weight_pass_s(hardware, model, batch) + kv_s, flops_s)


def _token_s(hardware: HardwareProfile, product_flops: float, attention_flops: float) -> float:
    return product_flops / hardware.dense_tflops / 1e12 + attention_flops / hardware.attention_tflops / 1e12


def elementwise_bytes_per_token(model: ModelSpec) -> int:
    """Bytes that one token's pass moves through the device's memory outside matrix products, all layers.

    Counted from the eager forward of a Llama-like layer in ``transformers`` v5, tensor by tensor (reads + writes): two RMSNorms in
    float32 of 18 and two residual sums of 3 elements of ``hidden`` each; SiLU and the gated product, 5 of ``ffn_width``; rotary
    embedding, 10 of the query and key widths; the attention's output made contiguous, 2; K and V written to the cache, 4 of ``kv_width``.
    """
    elements = 42 * model.hidden + 5 * model.ffn_width + 12 * model.attn_width + 14 * model.kv_width
    return elements * model.dtype_bytes * model.layers


def prefill_compute_s(hardware: HardwareProfile, model: ModelSpec, workload: Workload, batch: int, chunk_tokens: int) -> float:
    """Compute seconds of the whole prefill in passes of ``chunk_tokens`` per sequence; the LM head sees each last token only.

    A GPU's matrix products wait for what comes between them, which is bound by its memory.
    """
    prompt = workload.prompt_tokens
    head_flops = 2 * model.lm_head_bytes / model.dtype_bytes
    per_token_s = _token_s(hardware, model.flops_per_token - head_flops, model.attention_flops(prompt / 2))
    flops_s = batch * (prompt * per_token_s + head_flops / hardware.dense_tflops / 1e12)
    passes_s = prefill_passes(workload, chunk_tokens) * weight_pass_s(hardware, model, batch * chunk_tokens)
    if hardware.gpu:
        return max(flops_s + batch * prompt * elementwise_bytes_per_token(model) / hardware.gpu.memory_gbps / GB, passes_s)
    rows = batch * min(chunk_tokens, prompt)
    packing = (1 + FIXED.cpu_packing_rows / rows) / (1 + FIXED.cpu_packing_rows / FIXED.cpu_dense_rows)
    return flops_s * packing + passes_s


def prefill_passes(workload: Workload, chunk_tokens: int) -> int:
    """Passes over the weights that a prompt takes."""
    return -(-workload.prompt_tokens // chunk_tokens)


def kv_fill(workload: Workload) -> float:
    """Mean share of a sequence's KV pages that is in use while it decodes."""
    return (workload.prompt_tokens + workload.new_tokens / 2) / workload.max_tokens


def prompt_fill(workload: Workload) -> float:
    """Share of a sequence's KV pages that its prompt fills."""
    return workload.prompt_tokens / workload.max_tokens


def objective_weights(workload: Workload, batch: int) -> tuple[float, float]:
    """Weights of (prefill seconds, seconds of one decode step) in the objective.

    ``latency``: every request served, in whole batches. ``throughput``: the same for an endless stream, so batches count in
    parts. ``ttft``: the prefill, with decode to break ties.
    """
    if workload.objective is Objective.ttft:
        return 1.0, FIXED.ttft_decode_weight * workload.new_tokens
    if workload.objective is Objective.throughput:
        return workload.requests / batch, workload.requests / batch * workload.new_tokens
    waves = -(-workload.requests // batch)
    return waves, waves * workload.new_tokens


def predict(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> Prediction:
    """The prediction for ``decisions``, whoever made them; they must hold the rules of ``planner.rules``."""
    placement = place(model, decisions.weights, hardware.gpu is not None)
    kv = _kv_bytes(hardware, model, decisions)
    ssd_rate = ssd_gbps(hardware, decisions.weights.ssd.block_bytes, decisions.weights.ssd.queue_depth) * GB
    passes = prefill_passes(workload, decisions.prefill_chunk_tokens)
    earlier = (passes - 1) / 2 * prompt_fill(workload)
    weights_ssd_s, kv_ssd_s = placement.ssd_bytes_per_pass / ssd_rate, kv["ssd"] / ssd_rate
    loss = h2d_loss(hardware.gpu) if hardware.gpu else 0.0
    weights_h2d_s = _h2d_seconds(hardware, placement, decisions) + loss * weights_ssd_s
    kv_h2d_s = _kv_h2d_seconds(hardware, model, decisions, kv) + loss * kv_ssd_s
    d2h_rate = hardware.gpu.d2h.peak * GB if hardware.gpu else 1.0
    spilled = kv["h2d"] / d2h_rate
    far = hardware.gpu is not None and decisions.weights.embedding is Tier.dram
    rows = decisions.batch * workload.prompt_tokens
    write_s = kv["ssd"] / (hardware.ssd_write_gbps * GB) if kv["ssd"] else 0.0
    compute_s = prefill_compute_s(hardware, model, workload, decisions.batch, decisions.prefill_chunk_tokens)
    prefill = {
        Stage.ssd: passes * weights_ssd_s + earlier * kv_ssd_s + prompt_fill(workload) * write_s,
        Stage.h2d: passes * weights_h2d_s + earlier * kv_h2d_s,
        Stage.d2h: prompt_fill(workload) * spilled,
        Stage.compute: compute_s + (lookup_s(model, rows, passes) if far else 0.0),
    }
    decode = {
        Stage.ssd: weights_ssd_s + kv_fill(workload) * kv_ssd_s,
        Stage.h2d: weights_h2d_s + kv_fill(workload) * kv_h2d_s,
        Stage.d2h: spilled / workload.max_tokens,
        Stage.compute: decode_compute_s(hardware, model, workload, decisions.batch) + (lookup_s(model, decisions.batch, 1) if far else 0.0),
    }
    prefill_s, decode_s = max(prefill.values()), max(decode.values())
    prefill_weight, decode_weight = objective_weights(workload, decisions.batch)
    dram = used_bytes(dram_use(hardware, model, workload, decisions))
    return Prediction(
        load_s=load_s(hardware, model, workload, decisions),
        ttft_s=prefill_s,
        prefill_s=prefill_s,
        decode_s_per_token=decode_s,
        decode_tokens_per_s=decisions.batch / decode_s,
        bottleneck_prefill=max(prefill, key=prefill.__getitem__),
        bottleneck_decode=max(decode, key=decode.__getitem__),
        ssd_bytes_per_token=placement.ssd_bytes_per_pass + round(kv_fill(workload) * kv["ssd"]),
        h2d_bytes_per_token=placement.h2d_bytes_per_pass + round(kv_fill(workload) * kv["h2d"]),
        vram_bytes=used_bytes(vram_use(hardware, model, workload, decisions)),
        dram_bytes=dram,
        ssd_bytes=used_bytes(ssd_use(hardware, model, workload, decisions)),
        total_s=prefill_weight * prefill_s + decode_weight * decode_s,
        prefill_stages={str(stage): s for stage, s in prefill.items()},
        decode_stages={str(stage): s for stage, s in decode.items()},
    )


def load_s(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions, cached: float = 0.0) -> float:
    """Seconds from the imports' end to the first prefill, with a share ``cached`` of the weights in the page cache. Reading, page-locking,
    which begins before the imports, and the first use of every kernel overlap."""
    loaded = model.weight_bytes - place(model, decisions.weights, hardware.gpu is not None).ssd_bytes_per_pass
    ssd_rate = ssd_gbps(hardware, decisions.weights.ssd.block_bytes, decisions.weights.ssd.queue_depth)
    read_s = loaded / GB * ((1 - cached) / ssd_rate + cached / hardware.dram_copy_gbps)
    pinned = used_bytes(dram_use(hardware, model, workload, decisions))
    pin_s = max(0.0, pinned / GB * hardware.pin_s_per_gb - FIXED.imports_s)
    first_s = FIXED.first_kernels_s if hardware.gpu else FIXED.first_passes * decode_compute_s(hardware, model, workload, decisions.batch)
    return max(read_s, pin_s, first_s)


def _kv_bytes(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> dict[str, int]:
    page = kv_page_bytes(model, decisions.kv.page_tokens)
    outside = decisions.kv.dram_pages + decisions.kv.ssd_pages
    return {"ssd": decisions.kv.ssd_pages * page, "h2d": outside * page if hardware.gpu else 0}


def _h2d_seconds(hardware: HardwareProfile, placement: Placement, decisions: Decisions) -> float:
    gpu, chunk = hardware.gpu, decisions.weights.h2d.chunk_bytes
    sizes = [placement.unit_bytes(unit) for unit in placement.streamed_units]
    return sum(n / h2d_gbps(gpu, n, chunk) for n in sizes) / GB if gpu else 0.0


def _kv_h2d_seconds(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions, kv: dict[str, int]) -> float:
    if not kv["h2d"] or hardware.gpu is None:
        return 0.0
    layer = kv_layer_bytes(model, decisions.kv)
    return kv["h2d"] / h2d_gbps(hardware.gpu, layer, decisions.weights.h2d.chunk_bytes) / GB
