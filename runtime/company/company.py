"""The processes of one plan, seen from one of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import uninterrupted
from penstock.planner.common.outside.card_errors import is_of_card
from penstock.runtime.company.heart import Heart
from penstock.runtime.company.host_line import HostLine

if TYPE_CHECKING:
    import torch.distributed as dist

    from penstock.runtime.company.mail import Mail, Words

PATIENCE = timedelta(days=365)
"""Whoever hangs is found by the watchdog, whoever waits for a prompt does not hang."""
MEETING_TIME = timedelta(minutes=5)
"""For all ranks that a launcher started to come, with torch imported: until then no watchdog looks after them."""
MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""In the environment of a rank: where all of them meet."""
WHY_S = 8.0
"""Within which the watchdog says why a connection broke."""
OF_CARD_S = 1.0
"""The same where this rank's card failed, perhaps since another one is gone."""
_UNSET = "unset RANK and WORLD_SIZE to start one process alone"


@dataclass(frozen=True)
class Seat:
    """Which of the processes this one is."""

    rank: int
    count: int
    local: int = 0
    """Its number among those of its host."""
    on_host: int = 0
    """How many its host has; 0: all."""

    @property
    def hosts(self) -> int:
        """That the processes are on, as many on each."""
        return self.count // (self.on_host or self.count)

    @property
    def others(self) -> range:
        """Those that rank 0 leads."""
        return range(1, self.count)


class Company:
    """``heart`` is None until the watchdog's socket is known. One process is rank 0: it leads, and the user sees it alone."""

    def __init__(self, seat: Seat, heart: Heart | None, line: HostLine | None = None):
        self.seat, self.heart = seat, heart
        self.line = line
        """To the other hosts, where this process is the first of its host."""
        self.identity: str | None = None
        """Digest of the plan that this process was given; None where it takes rank 0's."""
        self._mail: Mail | None = None
        self._ways: dist.ProcessGroup | None = None
        self._joined = self._over = False

    @property
    def is_launched(self) -> bool:
        """Whether another process started this one, with its card."""
        return seat_of_environment() is not None

    @property
    def rank(self) -> int:
        return self.seat.rank

    @property
    def who(self) -> str:
        """How a line of this rank's begins, where nobody else says whose it is: the watchdog does of those behind rank 0."""
        return "" if self.rank else "rank 0: "

    @property
    def is_lost(self) -> bool:
        """Whether it is known that another one is gone."""
        return self._over or (self.heart is not None and self.heart.lost is not None)

    def join(self) -> None:
        """Meet the others over MASTER_ADDR and MASTER_PORT. Imports torch. A second call does nothing. UserError where one is lost."""
        if self._joined:
            return
        import torch.distributed as dist

        from penstock.runtime.company.mail import Mail

        with self.noticing(), uninterrupted():
            # nobody needs an address beside the group's: of one host all stay on its loopback
            patience = MEETING_TIME if self.heart is None else PATIENCE
            try:
                dist.init_process_group("gloo", init_method="env://", rank=self.rank, world_size=self.seat.count, timeout=patience)
            except (dist.DistStoreError, dist.DistNetworkError) as error:
                if self.heart is not None:
                    raise
                raise UserError(
                    f"not all of {self.seat.count} ranks came to {':'.join(os.environ[name] for name in MEETING)} within"
                    f" {patience.total_seconds():g} s; see which one hangs or has ended, and start all of them again"
                ) from error
            dist.distributed_c10d._get_default_store().set_timeout(PATIENCE)
            self._joined = True
            group, self._ways = (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
        self._mail = Mail(group)

    @property
    def ways(self) -> dist.ProcessGroup:
        """For hidden states, of gloo."""
        if self._ways is None:
            raise RuntimeError("join() comes first")
        return self._ways

    def tell(self, words: Words, count: int | None = None) -> None:
        """From rank 0 to the first ``count`` ranks, itself aside; None: to all. Nothing once one is lost: all others have ended."""
        if self.is_lost:
            return
        with self.noticing():
            self._post.tell(range(1, count or self.seat.count), words)

    def answer(self, words: Words) -> None:
        """To rank 0."""
        with self.noticing():
            self._post.tell((0,), words)

    def hear(self, rank: int = 0) -> Words:
        """The next that ``rank`` says."""
        with self.noticing():
            return self._post.hear(rank)

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Inside, a connection that breaks is a UserError of one line that names the rank that was lost."""
        try:
            yield
        except RuntimeError as error:
            of_card = is_of_card(error)
            if self._over or not (of_card or self._is_lost(error)):
                raise
            why = None if self.heart is None else self.heart.why(OF_CARD_S if of_card else WHY_S)
            if why is None and of_card:
                raise
            self._over = True
            self._leave_group()
            raise UserError(why or f"the connection to another rank was lost ({_first_line(error)}); run it again") from error

    def steady(self, yes: bool = True) -> None:
        """From now on silence means that this process hangs, or no longer does."""
        if self.heart is not None:
            self.heart.steady(yes)
        if self.line is not None:
            self.line.steady(yes)

    def told_elsewhere(self) -> None:
        """Whoever started this process says how it ended: where it is killed all ranks end without a line."""
        if self.heart is not None:
            self.heart.told_elsewhere()

    def failed(self, status: int, line: str) -> None:
        """This rank cannot go on, and so nobody can: rank 0 is to end with ``status`` and tell ``line``."""
        if self.heart is not None and self.heart.lost is None:
            self.heart.failed(status, line)
        elif self.heart is not None:
            self.heart.tell_lost()
        if self.line is not None:
            self.line.end(f"rank {self.rank}: {line}")

    def kill_others(self) -> None:
        """A pass was left in its middle: nobody can go on with it."""
        self._over = True
        if self.line is not None:
            self.line.end(f"rank {self.rank} was ended in the middle of a pass; all ranks have ended")
        if self.heart is not None:
            self.heart.kill_others()

    def leave(self) -> None:
        """The others may go, and their memory is free. Safe to call twice."""
        if self.rank == 0 and not self.is_lost and self._mail is None:
            self.kill_others()
        elif self.rank == 0 and not self.is_lost:
            self.tell({"what": "leave"})
            for rank in self.seat.others:
                self.hear(rank)
        self._over = True
        if self.line is not None:
            self.line.leave()
        if self.heart is not None:
            self.heart.leave()
        self._leave_group()

    def _leave_group(self) -> None:
        """Without a word to the others, who may be gone."""
        if not self._joined:
            return
        import torch.distributed as dist

        self._joined = False
        dist.destroy_process_group()

    def _is_lost(self, error: RuntimeError) -> bool:
        words = str(error)
        return (self.heart is not None and self.heart.lost is not None) or any(
            word in words for word in ("gloo", "NCCL", "onnection", "DistBackendError", "Broken pipe", "Socket")
        )

    @property
    def _post(self) -> Mail:
        if self._mail is None:
            raise RuntimeError("join() comes first")
        return self._mail


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:120]


def seat_of_environment() -> Seat | None:
    """What a launcher such as torchrun says in RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; None where nothing does. UserError for
    other text, for numbers that do not go together, and where nobody says where the ranks meet."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    found = {name: os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    for name, value in found.items():
        if not value.isdecimal():
            raise UserError(f"{name}={value}: must be a number, as torchrun sets it; {_UNSET}")
    seat = Seat(*map(int, found.values()))
    if seat.rank >= seat.count:
        raise UserError(f"RANK={seat.rank}: must be less than WORLD_SIZE={seat.count}, as torchrun sets it; {_UNSET}")
    if seat.on_host and seat.count % seat.on_host:
        raise UserError(
            f"LOCAL_WORLD_SIZE={seat.on_host}: each host must have as many of WORLD_SIZE={seat.count} ranks; give torchrun the same"
            " --nproc-per-node on all"
        )
    missing = [name for name in MEETING if not os.environ.get(name)]
    if missing and seat.count > 1:
        raise UserError(f"RANK and WORLD_SIZE are set, and {missing[0]} is not: torchrun sets all of them; {_UNSET}")
    return seat
