"""What a user is told when KV pages lie on a drive that is too slow for the plan."""

from __future__ import annotations

import math
from pathlib import Path

from planner.plan import Plan
from runtime.kv.worth import needed_gbps


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
