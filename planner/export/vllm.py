"""`to=vllm`: a `vllm serve` command with weights in DRAM (`--cpu-offload-gb`) and KV offloading.

Flags as documented in https://docs.vllm.ai/en/stable/api/vllm/config/offload/ (`--offload-backend`, `--cpu-offload-gb`,
`--cpu-offload-params`) and https://docs.vllm.ai/en/stable/api/vllm/config/cache/ (`--kv-cache-memory-bytes`, `--kv-offloading-size`,
`--kv-offloading-backend`, `--block-size`); the others in https://docs.vllm.ai/en/stable/cli/serve/. Both sizes of offloading are GiB there.

Under the `uva` backend kernels read offloaded weights from page-locked DRAM over the link while they compute, experts only as far as they
are visited; weights of decoder layers alone can be offloaded (https://docs.vllm.ai/en/stable/api/vllm/model_executor/offloader/uva/). vLLM
has no tier for weights on an SSD.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import kept_page_bytes, kv_page_bytes
from penstock.planner.export.exported import Exported, Flag, Losses, Lost, Request, Target, path_flag, script
from penstock.planner.export.otherwise import (
    Step,
    gpu_compute_s,
    h2d_s,
    head_streamed_bytes,
    kv_too_large,
    planned,
    still_experts,
    tables_outside_bytes,
    weights_outside_bytes,
)

BLOCKS = (16, 32, 64, 128)
"""Tokens of a block that vLLM's CUDA attention takes."""


def _export(request: Request) -> Exported:
    plan = request.plan
    if plan.hardware.gpu is None:
        raise UserError(f"to=vllm: this export is for a GPU, {request.plan_name} computes on the CPU; solve with a GPU, or change to=")
    outside, dram = offloaded_bytes(plan), plan.hardware.dram_bytes
    cannot = kv_too_large(plan)
    if outside > dram:
        cannot = (
            f"{show_bytes(outside)} of weights lie outside VRAM and all of them in DRAM, "
            f"{show_bytes(outside - dram)} more than the plan may use."
        )
    losses = Losses(tuple(_lost(plan)), None if cannot else _together(plan).tokens_per_s, cannot)
    return Exported(script(request, losses, "vllm serve", _flags(request)), losses)


def offloaded_bytes(plan: Plan) -> int:
    """Bytes of decoder layers in DRAM: what lies outside VRAM, and as much again as the tables take that cannot lie there."""
    model = plan.model
    return min(weights_outside_bytes(plan), model.weight_bytes - model.embed_bytes - model.head_bytes)


def _flags(request: Request) -> Iterator[Flag]:
    plan = request.plan
    d, work, kv = plan.decisions, plan.workload, plan.decisions.kv
    yield path_flag("", request.checkpoint, "MODEL", "the directory of a Hugging Face checkpoint")
    if outside := offloaded_bytes(plan):
        yield Flag("--offload-backend", "uva")
        yield Flag("--cpu-offload-gb", _gib(outside), f"{outside} bytes of weights outside VRAM, in GiB, rounded up")
        if _only_experts(plan):
            yield Flag("--cpu-offload-params", "experts", "the plan keeps all but routed experts in VRAM")
    yield Flag("--max-model-len", str(work.max_tokens))
    yield Flag("--max-num-seqs", str(d.batch))
    yield Flag("--max-num-batched-tokens", str(max(d.batch, d.prefill_chunk_tokens * d.batch)))
    yield Flag("--block-size", str(_block(kv.page_tokens)), f"pages of {kv.page_tokens} tokens")
    running = kv.vram_pages * kv_page_bytes(plan.model, kv.page_tokens)
    kept = kv.reuse.vram_pages * kept_page_bytes(plan.model, kv.page_tokens)
    yield Flag("--kv-cache-memory-bytes", str(running + kept), f"KV in VRAM: {running} bytes of running sequences, {kept} kept")
    if kv.reuse.dram_pages:
        size = kv.reuse.dram_pages * kept_page_bytes(plan.model, kv.page_tokens)
        yield Flag("--kv-offloading-size", _gib(size), f"{size} bytes of kept KV in DRAM, in GiB, rounded up")
        yield Flag("--kv-offloading-backend", "native")


def _gib(nbytes: int) -> str:
    """``nbytes`` in GiB, rounded up to two digits."""
    return f"{-(-nbytes * 100 // 2**30) / 100:g}"


def _block(page_tokens: int) -> int:
    """The largest block that is no larger than a page."""
    return max(size for size in BLOCKS if size <= page_tokens)


def _only_experts(plan: Plan) -> bool:
    """Whether routed experts are all that lies outside VRAM."""
    return plan.model.experts is not None and not plan.placement.streamed_units


def _read(plan: Plan, step: Step) -> Step:
    """Kernels read what lies outside VRAM while they compute, and wait for it: what computes from VRAM comes on top."""
    dense = plan.placement.h2d_bytes_per_pass
    nbytes = dense + still_experts(plan, whole_layers=False).outside_vram
    return replace(step, h2d_s=h2d_s(plan, nbytes), compute_s=gpu_compute_s(plan), routed_s=0.0, overlapped=False)


def _layers_alone(plan: Plan, step: Step) -> Step:
    """The tables lie in VRAM, and as many bytes of layers outside in their place."""
    more = tables_outside_bytes(plan) - head_streamed_bytes(plan)
    return replace(step, h2d_s=step.h2d_s + h2d_s(plan, max(0, more)))


def _together(plan: Plan) -> Step:
    return _layers_alone(plan, _read(plan, replace(planned(plan), ssd_s=0.0)))


def _lost(plan: Plan) -> Iterator[Lost]:
    own, w, kv = planned(plan), plan.decisions.weights, plan.decisions.kv
    if own.ssd_s:
        fits = offloaded_bytes(plan) <= plan.hardware.dram_bytes
        speed = replace(own, ssd_s=0.0).tokens_per_s if fits else None
        yield Lost("weights that stay on the SSD", "all weights lie in VRAM and DRAM", speed, "" if fits else "they do not fit")
    if plan.placement.streamed_units or plan.model.experts:
        yield Lost(
            f"{w.vram.slots} ring slots, copies ahead of compute",
            "kernels read over the link while they compute, nothing is copied ahead",
            _read(plan, own).tokens_per_s,
        )
        yield Lost("residents spread evenly", "the first parameters are offloaded until the size is reached", own.tokens_per_s)
    if tables_outside_bytes(plan):
        yield Lost(
            "LM head or embedding table outside VRAM",
            "only layers can lie there: more of them do, in the tables' place",
            _layers_alone(plan, own).tokens_per_s,
        )
    if plan.model.experts:
        yield Lost(
            "slots that keep the experts in use",
            "experts lie still; visited ones outside VRAM are read each time",
            None,
            "counted in the figure for the ring",
        )
    if kv.dram_pages or kv.ssd_pages:
        yield Lost(
            f"{kv.dram_pages} KV pages of running sequences in DRAM, {kv.ssd_pages} on the SSD",
            "KV of running sequences lies in VRAM; those without room wait",
            None,
            "how long is not in the plan",
        )
    if kv.reuse.ssd_bytes:
        yield Lost(f"{show_bytes(kv.reuse.ssd_bytes)} of kept KV on the SSD", "the native backend keeps it in DRAM only", own.tokens_per_s)
    if _block(kv.page_tokens) != kv.page_tokens:
        yield Lost(f"KV pages of {kv.page_tokens} tokens", f"blocks of {_block(kv.page_tokens)}", own.tokens_per_s)


VLLM = Target("vllm", "vllm serve with --cpu-offload-gb and KV offloading", "vllm.sh", _export)
