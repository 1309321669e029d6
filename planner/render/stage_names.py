"""What people call the resources that a phase waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from penstock.planner.contract.bills.cost import Phases
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Chain, Resource

IN_TURN = "card and CPU in turn"
"""What a step with units of the CPU waits for beyond its slowest resource: each layer needs the one before it."""
ROUTERS = "routers"
"""What a phase with routed experts waits for."""
_NAMES = {Resource.ssd: "SSD read", Resource.dram: "DRAM bus", Resource.h2d: "H2D", Resource.d2h: "D2H"}
_WAITS = {
    Chain.launched: ("host", "launching kernels and copies in turn", "in which kernels and copies wait for each other to be launched"),
    Chain.handed: ("host", "launching, and waiting for the CPU", "in which the host launches kernels or waits for the CPU"),
    Chain.behind: ("copies", "waiting for copies", "of copies beside which nothing is left to compute"),
    Chain.full: ("full ring", "all slots are full", "in which nothing is copied, since all slots are full"),
    Chain.late: (ROUTERS, "waiting for experts", "for experts that are known only after their router"),
    Chain.in_turn: (IN_TURN, "one after the other", "of each for what the other computed"),
}
"""What a phase waits for beyond its slowest resource: its name, what goes on meanwhile, and for what the seconds are."""
_DRAFTS = "drafts", "drafting and verifying", "for drafting tokens and verifying them"


class Wait(NamedTuple):
    """Seconds that a phase takes beyond its slowest resource, and beyond what no resource explains."""

    name: str
    meanwhile: str
    why: str
    seconds: float


def stage_names(plan: Plan) -> Mapping[Resource, str]:
    """Resource -> its name, in the order in which they are shown. What computes alone is compute; beside a card, the CPU is the CPU."""
    cpu = "CPU" if plan.hardware.gpu else "compute"
    return {**_NAMES, Resource.card: "compute", Resource.cpu: cpu}


def decode_waits(plan: Plan) -> tuple[Wait, ...]:
    """Of a decode step; of several ranks by what holds up the first one."""
    p, one = plan.prediction, plan.of_rank(0)
    beyond_s = p.decode_s_per_token - plan.passes_s["decode"] - max(p.decode_stages.values())
    if beyond_s <= 1e-9 * p.decode_s_per_token:
        return ()
    phases = Phases.of(one.hardware, one.model, one.workload, one.decisions)
    drafted_s = min(beyond_s, max(0.0, p.decode_s_per_token - phases.seconds.decode_s)) if plan.decisions.speculation.tokens else 0.0
    return tuple(_waits(plan, phases.step.chain, beyond_s - drafted_s, drafted_s, 1e-9 * p.decode_s_per_token))


def prefill_waits(plan: Plan) -> tuple[Wait, ...]:
    """The same of a prefill, without the seconds in which KV is restored."""
    p, one = plan.prediction, plan.of_rank(0)
    beyond_s = p.prefill_s - p.restore_s - plan.passes_s["prefill"] - max(p.prefill_stages.values())
    if beyond_s <= 1e-9 * p.prefill_s:
        return ()
    bill = Phases.of(one.hardware, one.model, one.workload, one.decisions).bill
    return tuple(_waits(plan, bill.chain, beyond_s, 0.0, 1e-9 * p.prefill_s))


def _waits(plan: Plan, chain: Chain | None, beyond_s: float, drafted_s: float, least_s: float) -> Iterator[Wait]:
    """Waits of ``least_s`` or less are none."""
    if beyond_s > least_s:
        chain = Chain.late if plan.model.experts else chain or Chain.launched
        yield Wait(*_WAITS[chain], beyond_s)
    if drafted_s > least_s:
        yield Wait(*_DRAFTS, drafted_s)


def decode_bound(plan: Plan) -> str:
    """What a decode step waits for."""
    waits = [wait.name for wait in decode_waits(plan)]
    if IN_TURN in waits:
        return IN_TURN
    held_up = Resource.h2d if _WAITS[Chain.full][0] in waits else plan.prediction.bottleneck_decode
    return stage_names(plan)[held_up]
