"""`to=llama.cpp`: a `llama-server` command: `-ngl`, `-ot` and the flags of its caches.

Flags as documented in https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md (`-ngl`, `-ot`, `-c`, `-np`, `-b`, `-ub`,
`-ctk`, `-ctv`, `-nkvo`, `-cram`, `--slot-save-path`, `-fit`). `-ngl N` takes the output and the last N - 1 layers
(https://github.com/ggml-org/llama.cpp/pull/18148; before, the last N layers, the output being the last to go). `-ot` came with
https://github.com/ggml-org/llama.cpp/pull/11397, whose thread names the tensors (`blk.N.attn_*`, `blk.N.ffn_*`,
`blk.N.ffn_{gate,up,down}_exps`); the earlier pattern wins.

What lies outside VRAM is computed by the CPU where it lies, and mapped from the file, not streamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock.planner.common.measures import GB, show_bytes
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.experts.expert_misses import visit
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import kept_page_bytes
from penstock.planner.export.exported import Exported, Flag, Losses, Lost, Request, Target, path_flag, script
from penstock.planner.export.otherwise import (
    Step,
    cpu_compute_s,
    expert_tiers,
    gpu_compute_s,
    planned,
    still_experts,
    weights_outside_bytes,
)


def _export(request: Request) -> Exported:
    losses = Losses(tuple(_lost(request.plan)), _together(request.plan).tokens_per_s)
    text = script(request, losses, "llama-server", _flags(request))
    return Exported(text, losses)


def _flags(request: Request) -> Iterator[Flag]:
    plan = request.plan
    d, work = plan.decisions, plan.workload
    yield path_flag("-m", request.checkpoint, "GGUF", "the model as a GGUF file, made by convert_hf_to_gguf.py of llama.cpp")
    yield from _placement(plan)
    yield Flag("-c", str(work.max_tokens * d.batch), f"{work.max_tokens} tokens for each of {d.batch} sequences")
    yield Flag("-np", str(d.batch))
    rows = d.prefill_chunk_tokens * d.batch
    yield Flag("-b", str(rows), "prompt tokens of one pass")
    yield Flag("-ub", str(rows))
    if plan.model.dtype_bytes == 2:
        yield Flag("-ctk", "bf16", "KV in 16 bits, as planned")
        yield Flag("-ctv", "bf16")
    if plan.hardware.gpu and (d.kv.dram_pages or d.kv.ssd_pages):
        yield Flag("-nkvo", note="KV outside VRAM: all of it, since it cannot be divided")
    reuse = d.kv.reuse
    kept_mib = reuse.dram_pages * kept_page_bytes(plan.model, d.kv.page_tokens) // 2**20
    yield Flag("-cram", str(kept_mib), f"kept KV in DRAM, MiB: {reuse.dram_pages} pages of {d.kv.page_tokens} tokens")
    if reuse.ssd_bytes:
        yield path_flag("--slot-save-path", request.directory, "KV_DIR", "a directory on the SSD")


def _placement(plan: Plan) -> Iterator[Flag]:
    if plan.hardware.gpu is None:
        yield Flag("-ngl", "0", "the CPU computes everything")
        return
    kept, layers = plan.decisions.weights.vram.resident_units, plan.model.layers
    most, partial, head = max(kept.attn, kept.ffn), abs(kept.attn - kept.ffn), head_in_vram(plan)
    first = layers - most
    yield Flag("-ngl", str(most + 1 if most or head else 0), f"the output and the last {most} of {layers} layers")
    yield Flag("-fit", "off", "as it says here, not as it finds room")
    if most and not head:
        yield Flag("-ot", "^output\\.weight=CPU", "not all of the LM head stays in VRAM")
    if partial:
        kind, stays = ("ffn", "attention") if kept.attn > kept.ffn else ("attn", "the FFN")
        yield Flag("-ot", f"{_layers(range(first, first + partial))}{kind}_.*=CPU", f"{partial} of these layers keep only {stays} in VRAM")
    still = [i for i in _experts_in_ram(plan) if i >= first]
    if still:
        yield Flag(
            "-ot",
            f"{_layers(still)}ffn_(gate|up|down)_exps.*=CPU",
            f"VRAM has room for the routed experts of {len(expert_tiers(plan)) - len(_experts_in_ram(plan))} layers",
        )


def head_in_vram(plan: Plan) -> bool:
    """Whether all of the LM head stays in VRAM; it is one tensor here."""
    return Tier.dram not in plan.placement.head


def _experts_in_ram(plan: Plan) -> list[int]:
    """MoE layers whose experts lie outside VRAM: the first ones, since it does not matter here which."""
    tiers = expert_tiers(plan)
    outside = sum(tier is not Tier.vram for tier in tiers.values())
    return sorted(tiers)[:outside]


def _layers(layers: Iterable[int]) -> str:
    """A pattern of the tensors of ``layers``: `blk\\.(3|4)\\.`."""
    return f"blk\\.({'|'.join(map(str, layers))})\\."


def _outside_share(plan: Plan) -> float:
    """Share of the bytes that one decode step touches which lie outside VRAM."""
    model, batch = plan.model, plan.decisions.batch
    touched = sum(model.attn_bytes) + sum(model.ffn_active_bytes(i, batch) for i in range(model.layers)) + model.lm_head_bytes
    outside = plan.placement.h2d_bytes_per_pass + still_experts(plan, whole_layers=False).outside_vram
    return min(1.0, outside / touched)


def _beyond_dram(plan: Plan) -> float:
    """Bytes of the weights outside VRAM that a step touches and DRAM has no room for, at least."""
    model, batch = plan.model, plan.decisions.batch
    outside = weights_outside_bytes(plan) if plan.hardware.gpu else model.weight_bytes
    beyond = max(0, outside - plan.hardware.dram_bytes)
    if model.experts is None:
        return beyond
    return beyond * visit(model.experts, batch).touched / model.experts.count


def _mapped(plan: Plan, step: Step) -> Step:
    """The file is mapped: what DRAM has no room for is read again with each pass, and not ahead. At the SSD's best rate, at least once."""
    best = max(point.gbps for point in plan.hardware.ssd_read)
    return replace(step, ssd_s=_beyond_dram(plan) / best / GB, overlapped=False)


def _computed(plan: Plan, step: Step) -> Step:
    """Nothing crosses the link; each side computes its share, one after the other."""
    share = _outside_share(plan)
    compute_s = share * cpu_compute_s(plan) + (1 - share) * gpu_compute_s(plan)
    return replace(step, h2d_s=0.0, d2h_s=0.0, routed_s=0.0, compute_s=compute_s)


def _together(plan: Plan) -> Step:
    own = planned(plan)
    return _mapped(plan, _computed(plan, own) if plan.hardware.gpu else replace(own, routed_s=0.0))


def _lost(plan: Plan) -> Iterator[Lost]:
    own, d, placement = planned(plan), plan.decisions, plan.placement
    outside = placement.h2d_bytes_per_pass + still_experts(plan, whole_layers=True).outside_vram
    if plan.hardware.gpu and outside:
        yield Lost(
            f"{show_bytes(outside)} of weights stream to the GPU", "the CPU computes them where they lie", _computed(plan, own).tokens_per_s
        )
    if _beyond_dram(plan):
        link_or_compute = replace(own, h2d_s=0.0, compute_s=max(own.h2d_s, own.compute_s), routed_s=0.0)
        yield Lost(
            "a DRAM cache that reads ahead, the rest kept still",
            "the file is mapped: the kernel reads what is missing when it is needed",
            _mapped(plan, link_or_compute).tokens_per_s,
        )
    if plan.model.experts:
        yield Lost(
            "slots that keep the experts in use",
            "experts lie still, by layer; the CPU computes those outside VRAM",
            None,
            "counted in the figure for what streams" if plan.hardware.gpu else "the CPU computes them either way",
        )
    if d.kv.dram_pages or d.kv.ssd_pages:
        yield Lost(
            f"{d.kv.vram_pages} KV pages in VRAM, {d.kv.dram_pages} in DRAM, {d.kv.ssd_pages} on the SSD",
            "all KV lies in DRAM, and the CPU computes attention over it",
            None,
            "the planner has no rate for this",
        )
    if d.kv.reuse.ssd_bytes:
        yield Lost(
            f"{show_bytes(d.kv.reuse.ssd_bytes)} of kept KV on the SSD, restored by itself",
            "slots are saved and restored by request (POST /slots/N?action=save)",
            None,
            "who asks for it is not in the plan",
        )


LLAMA_CPP = Target("llama.cpp", "llama-server's -ngl, -ot and cache flags", "llama.cpp.sh", _export)
