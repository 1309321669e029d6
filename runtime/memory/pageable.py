"""A plan re-predicted for a machine that refuses to page-lock its DRAM."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.given.curve import Curve
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.memory.arena import Arena


def slowed_by_pageable(plan: Plan, locked_share: float) -> Plan:
    """``plan`` with the link's rates for an arena of which only ``locked_share`` is page-locked, predicted anew.

    The rest moves at the profile's pageable rate: seconds per byte are the mean of both, weighted by share. A profile that does not know
    its pageable rate (0) leaves the plan as it is.
    """
    gpu = plan.hardware.gpu
    if gpu is None or gpu.h2d_pageable_gbps <= 0:
        return plan

    def slowed(gbps: float) -> float:
        return 1 / (locked_share / gbps + (1 - locked_share) / min(gbps, gpu.h2d_pageable_gbps))

    h2d = Curve(tuple((nbytes, slowed(gbps)) for nbytes, gbps in gpu.h2d.points))
    hardware = replace(plan.hardware, gpu=replace(gpu, h2d=h2d))
    return replace(plan, hardware=hardware, prediction=predict(hardware, plan.model, plan.workload, plan.decisions))


def pageable_note(arena: Arena, planned: Plan, slowed: Plan) -> str:
    """One line: how much was refused and why, and what that costs."""
    pageable, old, new = arena.nbytes - arena.locked_bytes, planned.prediction, slowed.prediction
    gpu = planned.hardware.gpu
    cost = "which the hardware profile has no rate for"
    if gpu is not None and gpu.h2d_pageable_gbps > 0:
        cost = (
            f"which moves at {gpu.h2d_pageable_gbps:.3g} GB/s, not {gpu.h2d.peak:.3g}: decode predicted"
            f" {show_seconds(new.decode_s_per_token)} a token, not {show_seconds(old.decode_s_per_token)}"
        )
    return (
        f"page-locking was refused ({arena.refused}) for {show_bytes(pageable)} of {show_bytes(arena.nbytes)} of DRAM, {cost};"
        " raise `ulimit -l` or give the container more locked memory"
    )
