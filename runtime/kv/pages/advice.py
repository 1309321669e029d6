"""The warning when KV pages lie on a drive that is too slow for the plan."""

from __future__ import annotations

import math
from pathlib import Path

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.kv.pages.worth import Worth

SLOWEST_GBPS, FASTEST_GBPS = 1e-6, 1e6
"""Between these a rate is searched."""
PRECISION = 1e-4


def advice(place: Path, plan: Plan, read_gbps: float) -> str | None:
    """One line when a prompt of the plan's length is computed sooner than any beginning of it is restored from ``place``, a drive of
    ``read_gbps``; else None."""
    length, need = plan.workload.prompt_tokens, needed_gbps(plan, plan.decisions.batch, plan.workload.prompt_tokens)
    if read_gbps > need:
        return None
    which = f"kv.dir={place} reads {read_gbps:.3g} GB/s, but with this plan restoring a prompt of {length} tokens pays"
    if math.isinf(need):
        return f"{which} from no drive, however fast: computing it takes no longer; leave kv.dir out, or keep it for longer prompts"
    return f"{which} only above {need:.3g} GB/s, so it is computed again; name a directory on a faster, local drive, or leave kv.dir out"


def needed_gbps(plan: Plan, batch: int, length: int, tries: int = 32) -> float:
    """The rate of a drive above which some prefix of ``batch`` prompts of ``length`` tokens is restored faster than it is computed.
    Infinite if no drive is fast enough, or if no full page lies before the prompts' last token.

    Tries prefixes of at most so many lengths, evenly spread up to the longest. Costs some 2 ms for each with 80 layers.
    """
    page = plan.decisions.kv.page_tokens
    pages = (length - 1) // page
    model = Worth(plan, FASTEST_GBPS)
    lengths = [length] * batch
    whole_s = model.prefill_s(lengths, [0] * batch)
    saved = {k: whole_s - model.prefill_s(lengths, [k * page] * batch) for k in range(pages, 0, -max(1, -(-pages // tries)))}

    def pays(gbps: float) -> bool:
        worth = Worth(plan, gbps)
        return any(worth.restore_s({Tier.ssd: batch * count}) < seconds for count, seconds in saved.items())

    slow, fast = SLOWEST_GBPS, FASTEST_GBPS
    if not pays(fast):
        return math.inf
    while fast > slow * (1 + PRECISION):
        middle = math.sqrt(slow * fast)
        slow, fast = (slow, middle) if pays(middle) else (middle, fast)
    return fast
