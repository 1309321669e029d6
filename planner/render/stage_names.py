"""What people call the resources that a phase waits for."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Resource
from penstock.planner.render.whereabouts import beside_card

IN_TURN = "card and CPU in turn"
"""What a step with units of the CPU waits for beyond its slowest resource: each layer needs the one before it."""
_NAMES = {Resource.ssd: "SSD read", Resource.dram: "DRAM bus", Resource.h2d: "H2D", Resource.d2h: "D2H"}


def stage_names(plan: Plan) -> Mapping[Resource, str]:
    """Resource -> its name, in the order in which they are shown. What computes alone is compute; beside a card, the CPU is the CPU."""
    cpu = "CPU" if plan.hardware.gpu else "compute"
    return {**_NAMES, Resource.card: "compute", Resource.cpu: cpu}


def waits_beyond_s(plan: Plan) -> float:
    """Seconds of a decode step beyond its slowest resource, and beyond what no resource explains."""
    p = plan.prediction
    return p.decode_s_per_token - plan.passes_s["decode"] - max(p.decode_stages.values())


def decode_bound(plan: Plan) -> str:
    """What a decode step waits for."""
    p = plan.prediction
    in_turn = bool(beside_card(plan)) and waits_beyond_s(plan) > 1e-9 * p.decode_s_per_token
    return IN_TURN if in_turn else stage_names(plan)[p.bottleneck_decode]
