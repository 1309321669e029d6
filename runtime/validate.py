"""Whether a run did what was promised: the rules held, the numbers are the unstreamed model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from planner.plan import Plan
from planner.units import ALIGN
from runtime.cache import CacheStats
from runtime.generate import Forward, Generation, pad_left
from runtime.kv import make_cache
from runtime.model import bind, build_skeleton, decoder_layers, parameters, submodule
from runtime.load import read_all
from runtime.store.base import open_store
from runtime.store.reader import ReadPool
from planner.placement import Unit


@dataclass(frozen=True)
class LogitsCheck:
    """Streamed against unstreamed logits over every pass of one batch."""

    passes: int
    identical: bool
    """Bit for bit."""
    max_abs_error: float
    max_abs_logit: float
    same_argmax: float
    """Share of sequences and passes whose most likely token agrees."""

    @property
    def within_rounding(self) -> bool:
        """Whether the largest difference is below 2 % of the largest logit: a few BF16 steps (2**-8) through the depth of a model."""
        return self.max_abs_error <= 0.02 * self.max_abs_logit


def broken_at_run_time(plan: Plan, stats: CacheStats, peak_dram: int, peak_vram: int | None) -> list[str]:
    """Rules that hold only if the engine obeyed: HWM never passed, nothing evicted in the window, budgets kept."""
    broken = []
    hwm = plan.decisions.weights.dram.hwm_layers
    if stats.peak_layers > hwm:
        broken.append(f"the DRAM cache held {stats.peak_layers} layers, hwm_layers={hwm}")
    if stats.evictions_in_window:
        broken.append(f"{stats.evictions_in_window} layers were evicted inside the prefetch window")
    if peak_dram > plan.hardware.dram_bytes:
        broken.append(f"DRAM peaked at {peak_dram} bytes, hardware.dram_bytes={plan.hardware.dram_bytes}")
    if peak_vram is not None and peak_vram > plan.hardware.vram_bytes:
        broken.append(f"VRAM peaked at {peak_vram} bytes, hardware.vram_bytes={plan.hardware.vram_bytes}")
    return broken


def load_unstreamed(checkpoint: Path, device: torch.device) -> nn.Module:
    """The whole model on ``device``: by transformers from a checkpoint, from its units when it is a packed store."""
    if not (checkpoint / "manifest.json").exists():
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto").to(device).eval()
    model = build_skeleton(checkpoint)
    store, layers = open_store(checkpoint, model), decoder_layers(model)
    pool = ReadPool(4, 4 << 20)
    places = [(model, layout) for layout in store.others().values()]
    places += [(submodule(layers, unit), store.unit(unit)) for i in range(len(layers)) for unit in (Unit("attn", i), Unit("ffn", i))]
    try:
        for module, layout in places:
            whole = torch.empty(layout.nbytes + ALIGN, dtype=torch.uint8)
            buffer = whole[-whole.data_ptr() % ALIGN :][: layout.nbytes]
            read_all(pool, [(layout.extents, memoryview(buffer.numpy()))], lambda _: None)
            bind(module, parameters(layout.tensors, buffer.to(device)))
    finally:
        pool.close()
    model.tie_weights()
    for module in model.modules():
        module._buffers.update({name: b.to(device) for name, b in module._buffers.items() if b is not None})
    return model


@torch.inference_mode()
def compare_logits(
    model: nn.Module, device: torch.device, prompts: list[list[int]], got: Generation, capacity: int, chunk: int, pad: int,
    progress: Callable[[int, int], None],
) -> LogitsCheck:
    """Feed the unstreamed ``model`` what the streamed one was fed, pass by pass, and compare the last position's logits."""
    ids, mask = pad_left(prompts, pad)
    padded = bool((mask == 0).any())
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = make_cache(model.config, capacity)
    forward = Forward(model, device, lambda: None)
    identical, error, largest, agree, total = True, 0.0, 0.0, 0, 0
    for k, (fed, logits) in enumerate(zip(got.fed, got.logits, strict=True)):
        if k == 0:
            for start in range(0, ids.shape[1], chunk):
                end = min(start + chunk, ids.shape[1])
                want = forward(ids[:, start:end], mask[:, :end] if padded else None, positions[:, start:end], cache)
        else:
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
            want = forward(fed, mask if padded else None, mask.sum(-1, keepdim=True) - 1, cache)
        want = want.cpu()
        identical &= torch.equal(want, logits)
        error = max(error, (want.float() - logits.float()).abs().max().item())
        largest = max(largest, want.float().abs().max().item())
        agree += int((want.argmax(-1) == logits.argmax(-1)).sum())
        total += len(prompts)
        progress(k + 1, len(got.logits))
    return LogitsCheck(len(got.logits), identical, error, largest, agree / max(1, total))
