"""Models that are not streamed, computed row by row packed into passes, and by transformers one row alone."""

from __future__ import annotations

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from penstock.planner.common.outside.cache_name import cache_name
from penstock.runtime.engine.passes.generate import Batch, Generation, generate
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.passes.stepper import Stepper
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.kv_windows import kinds
from penstock.runtime.model.rows import Step

CPU = torch.device("cpu")
PAGE_TOKENS = 16


def unstreamed(model: nn.Module, device: torch.device = CPU, slots: int = 160) -> Stepper:
    """All of ``model`` lies on ``device``."""
    return Stepper(model, device, KvPool(slots, PAGE_TOKENS, kinds(model.config), device))


def said(model: nn.Module, batch: Batch, device: torch.device = CPU) -> Generation:
    """Greedily, with the logits of every pass."""
    return generate(unstreamed(model, device), batch, Sampler(Sampling(), device), keep_logits=True)


class Alone:
    """What ``model`` says of each row when transformers computes it alone, with a cache of its own for each sequence."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """The wanted logits [step.wanted, vocab]."""
        parts = []
        for row in step.rows:
            cache = self._caches.setdefault(row.sequence, DynamicCache(config=self._model.config))
            out = self._model(input_ids=torch.tensor([row.tokens]), use_cache=True, **{cache_name(self._model.forward): cache})
            parts.append(out.logits[0, len(row.tokens) - row.wanted :])
        return torch.cat(parts)
