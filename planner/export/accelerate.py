"""`to=accelerate`: `device_map` and `max_memory` as JSON, for `from_pretrained` of transformers or accelerate's own loaders.

https://huggingface.co/docs/accelerate/concept_guides/big_model_inference: a device is a GPU's index, "cpu" or "disk". A module that is not
in the map goes where the nearest module around it goes. `max_memory` counts where no map is given, as in `infer_auto_device_map`. In a JSON
file its keys are text: `{int(k) if k.isdigit() else k: v for k, v in max_memory.items()}`.

A hook on the module that computes copies weights from "cpu" or "disk" to the GPU, just before the module computes. They lie in ordinary
tensors, which are not page-locked (`AlignDevicesHook.pre_forward` in
https://github.com/huggingface/accelerate/blob/main/src/accelerate/hooks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Price, Resource
from penstock.planner.export.exported import Exported, Losses, Lost, Request, Target, json_text
from penstock.planner.export.otherwise import (
    Step,
    computed_beside,
    copied,
    expert_tiers,
    head_streamed_bytes,
    kv_too_large,
    moved_price,
    planned,
    still_experts,
    tables_outside_bytes,
    weights_outside_bytes,
)


def device_map(plan: Plan) -> dict[str, int | str]:
    """Module -> device, for the decoder layout that transformers gives most models (`model.layers.N.self_attn` and `.mlp`).

    A layer in one tier is one entry. Of a layer in two tiers, norms stay with the compute, and so does a router whose experts lie
    elsewhere. accelerate moves the whole of a module that does not compute where it lies, whatever its parts are mapped to.
    """
    placement, gpu = plan.placement, plan.hardware.gpu is not None
    here: int | str = 0 if gpu else "cpu"
    device: dict[Tier, int | str] = {Tier.vram: 0, Tier.dram: "cpu", Tier.ssd: "disk"}
    head = here if Tier.dram not in placement.head or not gpu else "cpu"
    embedding = here if plan.decisions.weights.embedding is Tier.vram or not gpu else "cpu"
    if plan.model.tied:
        embedding = head = here if here in (head, embedding) else "cpu"
    mapped: dict[str, int | str] = {"model.embed_tokens": embedding, "model.rotary_emb": here}
    experts = expert_tiers(plan)
    for i, (attn, ffn) in enumerate(zip(placement.attn, placement.ffn, strict=True)):
        layer, tiers = f"model.layers.{i}", {attn, ffn, experts.get(i, ffn)}
        mapped[layer] = device[attn] if len(tiers) == 1 else here
        if len(tiers) > 1:
            mapped[f"{layer}.self_attn"] = device[attn]
            mapped[f"{layer}.mlp"] = device[ffn] if experts.get(i, ffn) is ffn else here
            if i in experts and experts[i] is not ffn and device[experts[i]] != here:
                mapped[f"{layer}.mlp.experts"] = device[experts[i]]
    return mapped | {"model.norm": here, "lm_head": head}


def max_memory(plan: Plan) -> dict[str, int]:
    """Bytes of weights per device as `infer_auto_device_map` takes them."""
    outside, model = weights_outside_bytes(plan), plan.model
    on_ssd = plan.placement.ssd_bytes_per_pass + still_experts(plan).on_ssd
    if plan.hardware.gpu is None:
        return {"cpu": model.weight_bytes - on_ssd}
    return {"0": model.weight_bytes - outside, "cpu": outside - on_ssd}


def _export(request: Request) -> Exported:
    plan = copied(request.plan)
    own = planned(plan)
    gpu = plan.hardware.gpu is not None
    lost = list(computed_beside(request.plan)) + (list(_lost(plan, own)) if gpu else list(_lost_on_cpu(plan, own)))
    together = _together(plan, own) if gpu else replace(_still(plan, own), overlapped=False)
    cannot = kv_too_large(plan)
    losses = Losses(tuple(lost), None if cannot else together.tokens_per_s, cannot)
    text = json_text(request, losses, {"device_map": device_map(plan), "max_memory": max_memory(plan)})
    return Exported(text, losses)


def _still(plan: Plan, step: Step) -> Step:
    """Experts lie still and move by whole layers: their tensors hold all of a layer's."""
    if plan.model.experts is None:
        return step
    moved, placement = still_experts(plan), plan.placement
    h2d, ssd = placement.h2d_bytes_per_pass + moved.outside_vram, placement.ssd_bytes_per_pass + moved.on_ssd
    return replace(step.moving(moved_price(plan, ssd, h2d)), routed_s=0.0)


def _more_bytes(plan: Plan) -> int:
    """The LM head in one piece, and the embedding table, where they lie outside VRAM: both are copied whole to compute with them."""
    return max(0, tables_outside_bytes(plan) - head_streamed_bytes(plan))


def _slower_h2d(plan: Plan, step: Step) -> Step | None:
    gpu = plan.hardware.gpu
    if not gpu or not gpu.h2d_pageable_gbps:
        return None
    slower = step.bill.of(Resource.h2d) * (gpu.h2d.peak / gpu.h2d_pageable_gbps - 1)
    return step.moving_more(Price({Resource.h2d: slower}))


def _lost(plan: Plan, own: Step) -> Iterator[Lost]:
    w, more = plan.decisions.weights, _more_bytes(plan)
    yield Lost(
        f"{w.vram.slots} ring slots, copies {w.vram.prefetch_distance} units ahead of compute",
        "a module's weights are copied when it computes, and nothing overlaps",
        replace(own, overlapped=False).tokens_per_s,
    )
    slower = _slower_h2d(plan, own)
    yield Lost(
        "page-locked DRAM",
        "weights are copied from memory that is not page-locked",
        slower.tokens_per_s if slower else None,
        "" if slower else "hardware.gpu.h2d_pageable_gbps was not measured",
    )
    if more:
        yield Lost(
            f"LM head in {w.head_blocks} blocks, embedding rows looked up in {w.embedding}",
            "a module moves whole: what lies outside VRAM is copied for each token",
            own.moving_more(moved_price(plan, 0, more)).tokens_per_s,
        )
    yield from _always(plan, own)


def _lost_on_cpu(plan: Plan, own: Step) -> Iterator[Lost]:
    c = plan.decisions.weights.dram
    yield Lost(
        f"DRAM cache, reads {c.prefetch_distance} layers ahead",
        "a module's weights are read when it computes, and nothing overlaps",
        replace(own, overlapped=False).tokens_per_s,
    )
    yield from _always(plan, own)


def _always(plan: Plan, own: Step) -> Iterator[Lost]:
    kv = plan.decisions.kv
    if plan.model.experts:
        yield Lost(
            "slots that keep the experts in use",
            "a layer's experts are one tensor: they lie still, and move all together",
            _still(plan, own).tokens_per_s,
        )
    if (plan.hardware.gpu and kv.dram_pages) or kv.ssd_pages:
        yield Lost("KV outside the compute device", "KV lies where the attention computes", None, "it does not fit there")
    yield Lost(
        f"batch {plan.decisions.batch}, {plan.decisions.prefill_chunk_tokens} prompt tokens a pass, kept KV",
        "whoever calls `generate` chooses, and keeps none",
        planned(plan).tokens_per_s,
    )


def _together(plan: Plan, own: Step) -> Step:
    step = _still(plan, own)
    step = replace(step.moving_more(moved_price(plan, 0, _more_bytes(plan))), overlapped=False)
    return _slower_h2d(plan, step) or step


ACCELERATE = Target("accelerate", "device_map and max_memory for transformers and accelerate", "accelerate.json", _export)
