"""`to=deepspeed`: a configuration of ZeRO-Inference as JSON, for `deepspeed.initialize` or `HfDeepSpeedConfig` of transformers.

Keys as documented in https://www.deepspeed.ai/docs/config-json/ (ZeRO stage 3, `offload_param`, `aio`) and
https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/zero/config.py; stage 3 with `offload_param` is ZeRO-Inference
(https://www.deepspeed.ai/2022/09/09/zero-inference.html). Sizes there are elements, not bytes. An unknown key beside the sections is
not read, so that a comment can stand there; inside `zero_optimization` it would be refused.

* Parameters persist in VRAM in the model's order while they fit `stage3_model_persistence_threshold`, if each is no larger than
  `stage3_param_persistence_threshold` (`mark_persistent_parameters` in deepspeed/runtime/zero/parameter_offload.py).
* `max_in_cpu` is read by the optimizer of stage 3 alone (deepspeed/runtime/zero/stage3.py), which inference has not: with `device: nvme`
  everything that does not persist is read from the SSD.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.export.exported import Exported, Losses, Lost, Request, Target, json_text
from penstock.planner.export.otherwise import (
    Step,
    expert_tiers,
    h2d_s,
    head_outside_bytes,
    head_streamed_bytes,
    kv_too_large,
    planned,
    ssd_s,
    still_experts,
    weights_outside_bytes,
)

NVME_PATH = "PATH_ON_THE_SSD"
"""What the file says where no directory was named."""


def _export(request: Request) -> Exported:
    plan = request.plan
    if plan.hardware.gpu is None:
        raise UserError(f"to=deepspeed: ZeRO-Inference computes on a GPU, {request.plan_name} on the CPU; solve with a GPU, or change to=")
    cannot = kv_too_large(plan)
    losses = Losses(tuple(_lost(plan)), None if cannot else _together(plan).tokens_per_s, cannot)
    return Exported(json_text(request, losses, config(plan, request.directory)), losses)


def on_nvme(plan: Plan) -> bool:
    """Whether weights outside VRAM go to the SSD: where DRAM is too small for all of them."""
    return weights_outside_bytes(plan) > plan.hardware.dram_bytes


def config(plan: Plan, directory: str | None) -> dict[str, Any]:
    """The configuration: one device for all weights outside VRAM, VRAM's residents by the persistence thresholds."""
    w, d, element = plan.decisions.weights, plan.decisions, plan.model.dtype_bytes
    outside = weights_outside_bytes(plan)
    unit = max(plan.model.attn_max, plan.model.ffn_max, _largest(plan))
    offload: dict[str, Any] = {"device": "nvme" if on_nvme(plan) else "cpu", "pin_memory": True}
    if on_nvme(plan):
        offload |= {"nvme_path": directory or NVME_PATH, "buffer_count": max(5, w.vram.slots), "buffer_size": _largest(plan) // element}
    zero = {
        "stage": 3,
        **({"offload_param": offload} if outside else {}),
        "stage3_prefetch_bucket_size": w.vram.prefetch_distance * unit // element,
        "stage3_max_live_parameters": max(1, w.vram.slots) * unit // element,
        "stage3_max_reuse_distance": 0,
        "stage3_param_persistence_threshold": _largest(plan) // element,
        "stage3_model_persistence_threshold": (plan.model.weight_bytes - outside) // element,
    }
    document: dict[str, Any] = {"train_micro_batch_size_per_gpu": d.batch, "zero_optimization": zero}
    if element == 2:
        document["bf16"] = {"enabled": True}
    if on_nvme(plan):
        document["aio"] = {
            "block_size": w.ssd.block_bytes,
            "queue_depth": w.ssd.queue_depth,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    return document


def _largest(plan: Plan) -> int:
    """Bytes of the largest parameter, at most: a table, half of an attention block, a matrix of an FFN, or two thirds of a layer's experts,
    whose gate and up projections are one tensor."""
    model, experts = plan.model, plan.model.experts
    routed = -(-2 * experts.count * experts.expert_bytes // 3) if experts else 0
    return max(model.embed_bytes, model.head_bytes, model.attn_max // 2, model.ffn_max, routed)


def _moved(plan: Plan, step: Step) -> Step:
    """All weights outside VRAM cross the link each step, and come from the SSD where DRAM is too small for all of them."""
    outside = weights_outside_bytes(plan)
    return replace(step, routed_s=0.0, h2d_s=h2d_s(plan, outside), ssd_s=ssd_s(plan, outside) if on_nvme(plan) else 0.0)


def _together(plan: Plan) -> Step:
    return _moved(plan, planned(plan))


def _lost(plan: Plan) -> Iterator[Lost]:
    own, placement, kv = planned(plan), plan.placement, plan.decisions.kv
    outside = weights_outside_bytes(plan)
    if on_nvme(plan):
        stay = placement.h2d_bytes_per_pass - placement.ssd_bytes_per_pass
        read = replace(own, ssd_s=ssd_s(plan, placement.h2d_bytes_per_pass), routed_s=0.0 if plan.model.experts is None else own.routed_s)
        yield Lost(
            f"{show_bytes(stay)} of weights stay in DRAM, the rest comes from the SSD",
            "one place for all outside VRAM: the SSD",
            read.tokens_per_s,
        )
    if plan.model.experts:
        moved = still_experts(plan, whole_layers=True)
        layers = sum(tier != "vram" for tier in expert_tiers(plan).values())
        ssd = placement.ssd_bytes_per_pass + moved.on_ssd
        still = replace(own, routed_s=0.0, h2d_s=h2d_s(plan, placement.h2d_bytes_per_pass + moved.outside_vram), ssd_s=ssd_s(plan, ssd))
        yield Lost("slots that keep the experts in use", f"all experts of {layers} layers move with each step", still.tokens_per_s)
    if head_outside_bytes(plan):
        more = max(0, head_outside_bytes(plan) - head_streamed_bytes(plan))
        yield Lost(
            f"LM head in {plan.decisions.weights.head_blocks} blocks",
            "it moves in one piece, and needs that much VRAM at once",
            replace(own, h2d_s=own.h2d_s + h2d_s(plan, more)).tokens_per_s,
        )
    if outside:
        yield Lost(
            "residents spread evenly",
            "the first parameters of the model persist, so copies come in a run",
            None,
            "how far prefetching evens that out is not in the planner",
        )
    if kv.dram_pages or kv.ssd_pages or kv.reuse.dram_pages or kv.reuse.ssd_bytes:
        yield Lost("KV outside VRAM, kept KV", "KV is the model's own, in VRAM; none is kept", None, "prompts are computed anew")


DEEPSPEED = Target("deepspeed", "a ZeRO-Inference configuration", "deepspeed.json", _export)
