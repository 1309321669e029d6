"""A verb that a launcher such as torchrun started once for each rank."""

from __future__ import annotations

from pathlib import Path

import xxhash

from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import plan_text
from penstock.runtime.company.company import Company, seat_of_environment
from penstock.runtime.company.starting import enter
from penstock.runtime.led.rank_process import be_led


def joined(plan: Plan, checkpoint: Path) -> tuple[Company | None, bool]:
    """The company that a launcher put this process in, None without one or where the plan is of one rank; and whether it is over: a rank
    behind the first one has done all that it was there for. UserError where as many were started as the plan has not."""
    seat = seat_of_environment()
    if seat is None or (plan.ranks.count == 1 and seat.count == 1):
        return None, False
    if seat.count != plan.ranks.count:
        raise UserError(
            f"WORLD_SIZE={seat.count}: the plan is for {plan.ranks.count} ranks; start as many (torchrun"
            f" --nproc-per-node={plan.ranks.count}), or solve again with ranks={seat.count}"
        )
    company = enter(seat)
    company.identity = xxhash.xxh3_128_hexdigest(plan_text(plan).encode())
    if seat.rank:
        be_led(company, checkpoint)
    return company, seat.rank > 0
