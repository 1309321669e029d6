"""A plan re-predicted for exactly the work at hand."""

from __future__ import annotations

from dataclasses import replace

from planner.cost import predict
from planner.plan import Plan
from runtime.order import Order
from runtime.schema import RunConfig


def for_requests(plan: Plan, count: int, longest: int, new_tokens: int, batch: int) -> Plan:
    """The same decisions for ``count`` requests of at most ``longest`` tokens, all of which are computed. The batch shrinks to the requests
    that there are; KV pages stay in proportion."""
    batch = min(batch, count)
    kv, old = plan.decisions.kv, plan.decisions.batch
    pages = {name: getattr(kv, name) // old * batch for name in ("vram_pages", "dram_pages", "ssd_pages")}
    decisions = replace(plan.decisions, batch=batch, kv=replace(kv, **pages))
    work = replace(plan.workload, batch=batch, prompt_tokens=longest, new_tokens=new_tokens, requests=count, shared_prefix_tokens=0)
    return replace(plan, workload=work, decisions=decisions, predicted=predict(plan.hardware, plan.model, work, decisions))


def random_count(cfg: RunConfig, plan: Plan) -> int:
    """Requests that are made at random when no text is given."""
    return cfg.batch or max(plan.decisions.batch, plan.workload.requests)


def foreseen(cfg: RunConfig, order: Order) -> Plan:
    """The plan for ``order`` before a tokenizer was read: a text counts as one token, so the work needs this much at least."""
    plan, limit = order.plan, order.capacity_tokens - order.new_tokens
    count = random_count(cfg, plan) if order.texts is None else len(order.texts)
    longest = min(cfg.prompt_tokens or plan.workload.prompt_tokens, limit) if order.texts is None else 1
    return for_requests(plan, count, longest, order.new_tokens, cfg.batch or plan.decisions.batch)
