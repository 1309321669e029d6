"""An order made ready to run: its prompts as token ids, and the plan re-predicted for exactly this work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from planner.cost import load_s
from planner.plan import Plan
from runtime.generate import Batch
from runtime.memory import Free, refuse_if_short, refuse_to_compare
from runtime.order import Order
from runtime.prompts import Request, Vocabulary, random_requests, read_vocabulary, requests_of
from runtime.schema import RunConfig, Validation
from runtime.store.cached import PageCache
from runtime.work import for_requests, random_count


@dataclass(frozen=True)
class Job:
    """A plan that was found fit to run, re-predicted for exactly the work that it was given."""

    plan: Plan
    checkpoint: Path
    device: torch.device
    vocabulary: Vocabulary
    requests: list[Request]
    max_new_tokens: int
    capacity_tokens: int
    """Tokens of KV for each sequence."""

    def batches(self) -> Iterator[Batch]:
        """The requests in the plan's batches."""
        size = self.plan.decisions.batch
        for k in range(0, len(self.requests), size):
            yield Batch(
                prompts=[r.ids for r in self.requests[k : k + size]],
                max_new_tokens=self.max_new_tokens,
                capacity=self.capacity_tokens,
                chunk_tokens=self.plan.decisions.prefill_chunk_tokens,
                stop_ids=self.vocabulary.stop_ids,
                pad=self.vocabulary.pad,
            )


def prepare(cfg: RunConfig, order: Order, device: torch.device, free: Free) -> Job:
    """Read the tokenizer and the prompts. UserError when they do not fit, or more memory is needed than was free."""
    plan, limit = order.plan, order.capacity_tokens - order.new_tokens
    vocabulary = read_vocabulary(order.checkpoint, plan.model.vocab)
    if order.texts is not None:
        requests = requests_of(order.texts, vocabulary, limit)
    else:
        tokens = cfg.prompt_tokens or plan.workload.prompt_tokens
        requests = random_requests(random_count(cfg, plan), tokens, vocabulary.size, limit, cfg.seed)
    longest = max(len(r.ids) for r in requests)
    plan = for_requests(plan, len(requests), longest, order.new_tokens, cfg.batch or plan.decisions.batch)
    refuse_if_short(plan, free)
    plan = _knowing_the_page_cache(plan, order.checkpoint)
    if cfg.validate is Validation.full:
        refuse_to_compare(plan.model, free)
    return Job(plan, order.checkpoint, device, vocabulary, requests, order.new_tokens, order.capacity_tokens)


def _knowing_the_page_cache(plan: Plan, checkpoint: Path) -> Plan:
    with closing(PageCache()) as cache:
        cached = cache.share(p for p in checkpoint.iterdir() if p.suffix in (".safetensors", ".bin"))
    again = load_s(plan.hardware, plan.model, plan.workload, plan.decisions, cached)
    return replace(plan, predicted=replace(plan.predicted, load_s=again))
