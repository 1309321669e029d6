"""An order made ready to run: its prompts as token ids, and the plan re-predicted for exactly this work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from planner.cost import predict
from planner.errors import UserError
from planner.plan import Plan
from runtime.generate import Batch
from runtime.memory import refuse_if_short
from runtime.order import Order
from runtime.prompts import Request, Vocabulary, random_requests, read_vocabulary, requests_of
from runtime.schema import RunConfig


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


def prepare(cfg: RunConfig, order: Order) -> Job:
    """Find the device, read the tokenizer and the prompts. UserError when they do not fit, or more memory is needed than is free."""
    plan, limit = order.plan, order.capacity_tokens - order.new_tokens
    device = _device(plan)
    vocabulary = read_vocabulary(order.checkpoint, plan.model.vocab)
    if order.texts is not None:
        requests = requests_of(order.texts, vocabulary, limit)
    else:
        count = cfg.batch or max(plan.decisions.batch, plan.workload.requests)
        requests = random_requests(count, cfg.prompt_tokens or plan.workload.prompt_tokens, vocabulary.size, limit, cfg.seed)
    plan = _for_requests(plan, requests, order.new_tokens, cfg.batch or plan.decisions.batch)
    refuse_if_short(plan, device)
    return Job(plan, order.checkpoint, device, vocabulary, requests, order.new_tokens, order.capacity_tokens)


def _device(plan: Plan) -> torch.device:
    if plan.hardware.gpu is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"the plan computes on a GPU ({plan.hardware.gpu.name}) and torch sees none here; solve again with hardware=cpu")
    return torch.device("cuda", 0)


def _for_requests(plan: Plan, requests: list[Request], new_tokens: int, batch: int) -> Plan:
    """The same decisions for the work at hand. The batch shrinks to the requests that there are; KV pages stay in proportion."""
    batch = min(batch, len(requests))
    kv, old = plan.decisions.kv, plan.decisions.batch
    pages = {name: getattr(kv, name) // old * batch for name in ("vram_pages", "dram_pages", "ssd_pages")}
    decisions = replace(plan.decisions, batch=batch, kv=replace(kv, **pages))
    longest = max(len(r.ids) for r in requests)
    work = replace(plan.workload, batch=batch, prompt_tokens=longest, new_tokens=new_tokens, requests=len(requests))
    return replace(plan, workload=work, decisions=decisions, predicted=predict(plan.hardware, plan.model, work, decisions))
