"""Whether reading pages is faster than computing them again."""

from __future__ import annotations

import math
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
    return nbytes / GB * (1 / read_gbps + 1 / _onward_gbps(plan))


def needed_gbps(plan: Plan, batch: int, length: int, tries: int = 32) -> float:
    """The rate of a drive above which some beginning of ``batch`` prompts of ``length`` tokens is restored sooner than computed; infinite
    where no drive is fast enough, and where the prompts have no full page before their last token.

    Beginnings of so many lengths are tried at most, evenly spread up to the longest. Costs some 2 ms for each with 80 layers.
    """
    page = plan.decisions.kv.page_tokens
    pages = (length - 1) // page
    starts = [k * page for k in range(pages, 0, -max(1, -(-pages // tries)))]
    return min((_needed_gbps(plan, batch, length, start) for start in starts), default=math.inf)


def _needed_gbps(plan: Plan, batch: int, length: int, start: int) -> float:
    nbytes = batch * start * plan.model.kv_bytes_per_token
    spare_s_per_gb = saved_s(plan, batch, length, start) * GB / nbytes - 1 / _onward_gbps(plan)
    return 1 / spare_s_per_gb if spare_s_per_gb > 0 else math.inf


def _onward_gbps(plan: Plan) -> float:
    gpu = plan.hardware.gpu
    return gpu.h2d_pageable_gbps if gpu else plan.hardware.dram_copy_gbps


def _stages(plan: Plan, batch: int, tokens: int) -> dict[str, float]:
    work = replace(plan.workload, batch=batch, prompt_tokens=tokens)
    return dict(predict(plan.hardware, plan.model, work, replace(plan.decisions, batch=batch)).prefill_stages)
