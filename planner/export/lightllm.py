"""`to=lightllm`: LightLLM's launch command for the tiers of KV.

Flags as documented in https://github.com/ModelTC/lightllm/blob/main/lightllm/server/api_cli.py and, for the caches in DRAM and on disk,
https://github.com/ModelTC/lightllm/blob/main/docs/EN/source/tutorial/multi_level_cache_deployment.rst. A cache's GB are 2**30 bytes there
(https://github.com/ModelTC/lightllm/blob/main/lightllm/utils/kv_cache_utils.py). LightLLM keeps all weights in VRAM.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import kept_page_bytes, vram_use
from penstock.planner.export.exported import Exported, Flag, Losses, Lost, Request, Target, path_flag, script
from penstock.planner.export.otherwise import gpu_compute_s, kv_too_large

_IN_RING = ("residents", "ring", "experts", "embedding", "norms")
"""Items of VRAM that hold weights."""


def _export(request: Request) -> Exported:
    plan = request.plan
    if plan.hardware.gpu is None:
        raise UserError(f"to=lightllm: LightLLM computes on a GPU, {request.plan_name} on the CPU; solve with a GPU, or change to=")
    use = vram_use(plan.hardware, plan.model, plan.workload, plan.decisions)
    need = plan.model.weight_bytes + sum(n for item, n in use.items() if item not in _IN_RING)
    short = need - plan.hardware.vram_bytes
    cannot = kv_too_large(plan)
    if short > 0:
        cannot = f"all weights lie in VRAM, which takes {show_bytes(need)}, {show_bytes(short)} more than the card has."
    losses = Losses(tuple(_lost(plan, short)), None if cannot else plan.decisions.batch / gpu_compute_s(plan), cannot)
    text = script(request, losses, "python -m lightllm.server.api_server", _flags(request))
    return Exported(text, losses)


def _flags(request: Request) -> Iterator[Flag]:
    plan = request.plan
    d, work = plan.decisions, plan.workload
    reuse, page = d.kv.reuse, kept_page_bytes(plan.model, d.kv.page_tokens)
    running = d.kv.pages // plan.model.layers * d.kv.page_tokens
    yield path_flag("--model_dir", request.checkpoint, "MODEL", "the directory of a Hugging Face checkpoint")
    yield Flag("--tp", "1")
    yield Flag(
        "--max_total_token_num", str(running + reuse.vram_pages * d.kv.page_tokens),
        f"L1: {running} tokens of running sequences, {reuse.vram_pages} kept pages of {d.kv.page_tokens}",
    )  # fmt: skip
    yield Flag("--max_req_total_len", str(work.max_tokens), f"{work.prompt_tokens} prompt and {work.new_tokens} new tokens")
    yield Flag("--running_max_req_size", str(d.batch))
    yield Flag("--chunked_prefill_size", str(d.prefill_chunk_tokens))
    yield Flag("--batch_max_tokens", str(d.prefill_chunk_tokens * d.batch))
    on_disk = bool(reuse.ssd_bytes)
    if reuse.dram_pages or on_disk:
        yield Flag("--enable_cpu_cache")
        pages = max(1, reuse.dram_pages)
        yield Flag("--cpu_cache_storage_size", _gib(pages * page), f"L2: {reuse.dram_pages} kept pages of {page} bytes, in GiB")
        yield Flag("--cpu_cache_token_page_size", str(d.kv.page_tokens))
    if on_disk:
        yield Flag("--enable_disk_cache")
        yield Flag("--disk_cache_storage_size", _gib(reuse.ssd_bytes), f"L3: {reuse.ssd_bytes} bytes of files, in GiB")
        yield path_flag("--disk_cache_dir", request.directory, "KV_DIR", "a directory on the SSD")


def _gib(nbytes: int) -> str:
    """``nbytes`` in GiB, with as many digits as give every byte."""
    return f"{nbytes / 2**30:.9f}".rstrip("0").rstrip(".")


def _lost(plan: Plan, short: int) -> Iterator[Lost]:
    placement, kv = plan.placement, plan.decisions.kv
    routed = plan.model.experts and plan.decisions.experts
    streams = bool(placement.streamed_units) or bool(routed and plan.decisions.experts.vram_slots < plan.model.experts.units)
    if streams:
        fits = plan.decisions.batch / gpu_compute_s(plan) if short <= 0 else None
        yield Lost("weights stream from DRAM and SSD", "all weights lie in VRAM", fits, "" if fits else "they do not fit this card")
    if kv.dram_pages or kv.ssd_pages:
        yield Lost(
            f"{kv.dram_pages} KV pages of running sequences in DRAM, {kv.ssd_pages} on the SSD",
            "KV of running sequences lies in VRAM; what has no room waits",
            None,
            "how long requests wait is not in the plan",
        )
    if kv.reuse.ssd_bytes and not kv.reuse.dram_pages:
        yield Lost(
            "kept KV on the SSD without a copy in DRAM",
            "pages reach the disk through the cache in DRAM, here of one page",
            plan.predicted.decode_tokens_per_s,
        )


LIGHTLLM = Target("lightllm", "LightLLM's launch command, for the tiers of KV", "lightllm.sh", _export)
