"""A verb that a launcher such as torchrun started once for each rank."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path
from types import FrameType

import xxhash

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import plan_text
from penstock.runtime.company.cards_here import check_cards
from penstock.runtime.company.company import Company, seat_of_environment
from penstock.runtime.company.host_claims import HostClaims, versions
from penstock.runtime.company.starting import enter
from penstock.runtime.led.rank_process import be_led
from penstock.runtime.memory.free_memory import refuse_full_cards

MOMENT_S = 1.0
"""Within which the watchdog says that a rank was lost, where the launcher ends all for that."""
_AGAIN_S = 0.05


def joined(plan: Plan, checkpoint: Path, deaf: bool = False) -> tuple[Company | None, bool]:
    """The company that a launcher put this process in, None without one or where the plan is of one rank; and whether it is over: a rank
    behind the first one has done all that it was there for. UserError where as many were started as the plan has not, or on other hosts.

    A launcher and a terminal send their signals to all ranks. One behind the first ends by SIGTERM, unless it is ``deaf``: then rank 0
    says when all is over, for which it may need the others."""
    seat, hosts = seat_of_environment(), plan.hardware.hosts
    if seat is None or (plan.ranks.count == 1 and seat.count == 1):
        return None, False
    if seat.count != plan.ranks.count:
        raise UserError(
            f"WORLD_SIZE={seat.count}: the plan is for {plan.ranks.count} ranks; start as many (torchrun"
            f" --nproc-per-node={plan.ranks.count}), or solve again with ranks={seat.count}"
        )
    if seat.hosts != hosts:
        each = seat.count // hosts
        raise UserError(
            f"LOCAL_WORLD_SIZE={seat.on_host}: the plan is for {hosts} host{'s' * (hosts > 1)} of {each} ranks each, and these are"
            f" {seat.hosts}; start torchrun with --nnodes={hosts} --nproc-per-node={each}, or solve again with hardware.hosts={seat.hosts}"
        )
    if seat.rank:  # it has nothing to tell, and may be waiting for others
        signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP) if deaf else ():
            signal.signal(number, signal.SIG_IGN)
    check_cards(plan, launched=True)
    refuse_full_cards(plan, {seat.rank: seat.local})
    identity = xxhash.xxh3_128_hexdigest(plan_text(plan).encode())

    def claims() -> HostClaims:
        digest = spec_from_checkpoint(checkpoint).digest
        return HostClaims(socket.gethostname(), seat.rank, seat.on_host, seat.count, versions(), identity, digest or "")

    company = enter(seat, claims)
    company.identity = identity
    if seat.rank:
        be_led(company, checkpoint)
    else:
        end_by_line(company)
    return company, seat.rank > 0


def end_by_line(company: Company) -> None:
    """Have SIGTERM do nothing where another rank was lost: the launcher sends it as well, and this process ends by the line that names the
    rank."""
    usual = signal.getsignal(signal.SIGTERM)
    if not callable(usual):
        return

    def heard(number: int, frame: FrameType | None) -> None:
        until = time.monotonic() + MOMENT_S
        while not company.is_lost and time.monotonic() < until:  # no lock: the main thread may hold it
            time.sleep(_AGAIN_S)
        if not company.is_lost:
            usual(number, frame)

    signal.signal(signal.SIGTERM, heard)
