"""Whether reading pages is faster than computing them again."""

from __future__ import annotations

from dataclasses import replace

from planner.cost import Stage, predict
from planner.plan import Plan
from planner.units import GB


def saved_s(plan: Plan, batch: int, length: int, start: int) -> float:
    """Predicted seconds that a prefill of ``batch`` prompts of ``length`` tokens loses by beginning at token ``start``.

    Transfers are a matter of passes: as long as the rest takes one, streamed weights move all the same. The rest attends to all tokens
    before it, so its compute is that of the whole less that of the beginning, but no less than that of a prompt of its length.
    """
    whole, head, rest = (_stages(plan, batch, tokens) for tokens in (length, start, length - start))
    rest[Stage.compute] = max(whole[Stage.compute] - head[Stage.compute], rest[Stage.compute])
    return max(whole.values()) - max(rest.values())


def restore_s(plan: Plan, nbytes: int, read_gbps: float) -> float:
    """Seconds to read ``nbytes`` of pages and bring them to where they are computed with, one after the other: never too few."""
    gpu = plan.hardware.gpu
    return nbytes / GB * (1 / read_gbps + 1 / (gpu.h2d_pageable_gbps if gpu else plan.hardware.dram_copy_gbps))


def _stages(plan: Plan, batch: int, tokens: int) -> dict[str, float]:
    work = replace(plan.workload, batch=batch, prompt_tokens=tokens)
    return dict(predict(plan.hardware, plan.model, work, replace(plan.decisions, batch=batch)).prefill_stages)
