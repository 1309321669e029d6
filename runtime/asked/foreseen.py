"""A plan re-predicted for exactly the work at hand."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.rank_predictions import predict_ranks
from penstock.runtime.asked.order import Order, pages_each, random_tokens
from penstock.runtime.asked.run_schema import RunConfig
from penstock.runtime.asked.schedule import context_tokens


def for_requests(plan: Plan, count: int, longest: int, new_tokens: int, batch: int) -> Plan:
    """The same decisions for ``count`` requests of at most ``longest`` tokens, all of which are computed. The batch shrinks to the requests
    that there are; KV pages stay in proportion. A server's plan becomes one of batches, each of whose sequences has the tokens that the
    server would give it, as far as the pool holds them."""
    batch = min(batch, count)
    decided = [_fewer(plan.of_rank(rank), batch, plan.chunk_tokens(batch)) for rank in range(plan.ranks.count)]
    work = replace(plan.workload.in_batches(batch, count), prompt_tokens=longest, new_tokens=new_tokens, shared_prefix_tokens=0)
    made = predict_ranks(plan.hardware, plan.model, work, decided, plan.dealing)
    ranks = replace(plan.ranks, others=tuple(decided[1:]))
    return replace(plan, workload=work, decisions=decided[0], ranks=ranks, prediction=made)


def _fewer(own: Plan, batch: int, chunk_tokens: int) -> Decisions:
    """What one rank decides, for ``batch`` sequences."""
    kv = own.decisions.kv
    layer, some = kv.pages // own.model.layers, pages_each(own, batch) * batch
    pages = {name: getattr(kv, name) // layer * some for name in ("vram_pages", "dram_pages", "ssd_pages")}
    return replace(own.decisions, batch=batch, prefill_chunk_tokens=chunk_tokens, kv=replace(kv, **pages))


def random_count(cfg: RunConfig, plan: Plan) -> int:
    """Requests that are made at random when no text is given."""
    return cfg.batch or max(plan.decisions.batch, plan.workload.requests)


def foreseen(cfg: RunConfig, order: Order) -> Plan:
    """The plan for ``order`` before a tokenizer was read. A text counts as one token and a reply as none, so this is the least work."""
    plan = order.plan
    if order.requests is None:
        count, longest = random_count(cfg, plan), random_tokens(cfg, plan)
    else:
        count, talks = len(order.requests), [r.conversation for r in order.requests]
        longest = max(context_tokens(talks, [r.known_tokens for r in order.requests], [0] * count))
    return for_requests(plan, count, min(longest, order.prompt_limit), order.new_tokens, order.batch)
