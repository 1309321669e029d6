"""Whether reading pages is faster than computing them again: the planner's model, at the rates of this run."""

from __future__ import annotations

from dataclasses import replace

from planner import reuse
from planner.decisions import Tier
from planner.plan import Plan
from planner.stages import Prefill


def saved_s(plan: Plan, batch: int, length: int, start: int) -> float:
    """Predicted seconds that a prefill of ``batch`` prompts of ``length`` tokens loses by beginning at token ``start``."""
    work = replace(plan.workload, batch=batch, prompt_tokens=length)
    return reuse.saved_s(Prefill(plan.hardware, plan.model, work, replace(plan.decisions, batch=batch)), start)


def restore_s(plan: Plan, nbytes: int, read_gbps: float) -> float:
    """Seconds to read ``nbytes`` of pages, bring them over the link from DRAM that is not page-locked, and to where they are computed with,
    one after the other: never too few."""
    decisions, gpu = plan.decisions, plan.hardware.gpu
    rates = reuse.restoring(plan.hardware, plan.model, decisions.kv.page_tokens, decisions.weights.ssd.queue_depth)
    rates = replace(rates, page_bytes=nbytes, ssd_gbps=read_gbps, h2d_gbps=gpu.h2d_pageable_gbps if gpu else rates.h2d_gbps)
    return sum(rates.stages({Tier.ssd: 1}, 1).values())
