"""What a piece of work costs: seconds of each resource, and bytes of each tier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.given.hardware import HardwareProfile

Amount = Any
"""A number, or a linear expression of the integer program's variables."""
Key = TypeVar("Key", bound=StrEnum)
_NUMBERS = (int, float)


SHARED = 0.7
"""Of the seconds of launches and of copies together: what a pass takes at least, since one interpreter issues both in turn. 1 would be one
after the other. Of an 8B geometry on an H100, INT4 with 70 ms of launches and 71 of copies took 100 ms, FP8 with 82 of copies 101. On an
H200 INT4, FP8 and Q4_K took about 93, 97 and 86 with 53, 64 and 49 of copies, which agrees for 75 ms of launches. The lossless form and
BF16, with 127 and 194 of copies, took these."""


class Resource(StrEnum):
    """What a byte or a FLOP waits for."""

    ssd = "ssd"
    """Reads and writes of the drive."""
    dram = "dram"
    """The host's memory bus. What the drive reads, what is copied to or from the card and what the CPU multiplies by passes once."""
    h2d = "h2d"
    d2h = "d2h"
    card = "card"
    """The card's compute, and the host that issues it."""
    cpu = "cpu"


class Place(StrEnum):
    """Who computes with a unit, and whether it comes for each pass."""

    card = "card"
    """The card, which keeps it."""
    ring = "ring"
    """The card, to which the VRAM ring brings it."""
    host = "host"
    """The CPU, where DRAM holds it."""


class Late(StrEnum):
    """Layers that wait for experts."""

    first = "first"
    """A prompt's first, of each rank."""
    every = "every"
    full = "full"
    """All, for slots as well: what was kept is computed before what came, and frees none."""


class Chain(StrEnum):
    """What a piece of work may wait for longer than for any resource."""

    launched = "launched"
    """Kernels and copies, which one interpreter issues."""
    handed = "handed"
    """The interpreter, which launches, or waits for what the CPU computes."""
    behind = "behind"
    """Copies beside which nothing is left to compute."""
    full = "full"
    """The link, which rests while the ring is full."""
    late = "late"
    """Experts that are known when routers have spoken."""
    in_turn = "in_turn"
    """The card and the CPU, one for the other."""


def computing(place: Place) -> Resource:
    """What computes with a unit there."""
    return Resource.cpu if place is Place.host else Resource.card


def computing_of(hardware: HardwareProfile) -> Resource:
    """What computes on a machine, as plans have it today."""
    return Resource.card if hardware.gpu else Resource.cpu


@dataclass(frozen=True)
class Price:
    """Of one piece of work or, summed, of all of it. What is not named costs nothing."""

    seconds: Mapping[Resource, Amount] = field(default_factory=dict)
    nbytes: Mapping[Tier, Amount] = field(default_factory=dict)
    """Taken for the whole run."""
    issued: Amount = 0
    """Seconds in which the interpreter launches kernels, part of the card's: what copies to the card are queued beside."""
    handing: Amount = 0
    """Seconds in which the interpreter waits for what it has handed over to the CPU, and launches nothing."""
    behind: Amount = 0
    """Seconds of copies for which the card waits while nothing else is computed: those of the LM head, or of FFN units in the only slot of
    their kind."""
    rests: Amount = 0
    """Seconds in which the link copies nothing, since the ring is full: while a pass looks its tokens up, while the CPU computes the last
    of the LM head, or while the card computes an FFN in the only slot of its kind."""
    late: Mapping[Late, Amount] = field(default_factory=dict)
    """Seconds for which compute waits in its layers for experts that come when their routers have spoken, less what it does meanwhile;
    nothing where that is less than 0."""
    alongside: Amount = 0
    """Of the CPU's seconds, those that the card does not wait for in turn: of experts, whose visits have a law of their own,
    ``penstock.planner.contract.bills.routed``, those in which threads read ahead of a unit, and those of attention in which the
    interpreter launches what comes behind."""

    def __add__(self, other: Price) -> Price:
        seconds, nbytes = _sum(self.seconds, other.seconds), _sum(self.nbytes, other.nbytes)
        issued, handing = self.issued + other.issued, self.handing + other.handing
        behind, rests, late = self.behind + other.behind, self.rests + other.rests, _sum(self.late, other.late)
        return Price(seconds, nbytes, issued, handing, behind, rests, late, self.alongside + other.alongside)

    def __mul__(self, count: Amount) -> Price:
        """So many times, one after the other on each resource and side by side in each tier."""
        seconds, nbytes = {r: s * count for r, s in self.seconds.items()}, {t: n * count for t, n in self.nbytes.items()}
        issued, behind = self.issued * count if _is_any(self.issued) else 0, self.behind * count if _is_any(self.behind) else 0
        handing, rests = self.handing * count if _is_any(self.handing) else 0, self.rests * count if _is_any(self.rests) else 0
        late = {layers: seconds * count for layers, seconds in self.late.items()} if self.late else self.late
        return Price(seconds, nbytes, issued, handing, behind, rests, late, self.alongside * count if _is_any(self.alongside) else 0)

    def of(self, resource: Resource) -> Amount:
        """Seconds of ``resource``."""
        return self.seconds.get(resource, 0.0)

    @property
    def computing(self) -> Amount:
        """Seconds of the card, or of the CPU where there is none."""
        return self.of(Resource.card if Resource.card in self.seconds else Resource.cpu)

    @property
    def in_turn(self) -> Amount:
        """Seconds that launching kernels and queueing copies take at least; 0 where nothing is launched."""
        return SHARED * (self.of(Resource.h2d) + self.issued) if self.issues else 0.0

    @property
    def issues(self) -> bool:
        """Whether anything is launched."""
        return _is_any(self.issued)

    @property
    def hands_over(self) -> bool:
        """Whether the interpreter waits for the CPU."""
        return _is_any(self.handing)

    @property
    def waits(self) -> bool:
        """Whether anything is :attr:`behind`."""
        return _is_any(self.behind)

    @property
    def is_full(self) -> bool:
        """Whether the link ever :attr:`rests`."""
        return _is_any(self.rests)

    @property
    def shares(self) -> bool:
        """Whether anything goes on :attr:`alongside`."""
        return _is_any(self.alongside)

    @property
    def issuing_s(self) -> float:
        """Seconds that the interpreter takes at least for what it launches, queues and waits for, where these are numbers."""
        return float(max(self.in_turn, self.issued + self.handing if self.issues and self.hands_over else 0.0))

    def least(self) -> Iterator[Amount]:
        """Seconds that the work takes at least: those of each resource, and of its chains.

        Resources work side by side. The card and the CPU follow each other, since each layer needs what the one before it computed.
        Launching kernels and queueing copies share the interpreter. The LM head comes behind the last layer. The link rests while the
        ring is full.
        """
        yield from (self.of(resource) for resource in Resource)
        yield from (seconds for _, seconds in self._chains())

    def _chains(self) -> Iterator[tuple[Chain, Amount]]:
        yield Chain.launched, self.in_turn
        yield Chain.handed, self.issued + self.handing if self.hands_over else 0.0
        yield Chain.behind, self.of(Resource.card) + self.behind if self.waits else 0.0
        yield Chain.full, self.of(Resource.h2d) + self.rests if self.is_full else 0.0
        for layers in Late:
            yield Chain.late, self.computing + self.behind + self.late[layers] if layers in self.late else 0.0
        both = Resource.card in self.seconds and Resource.cpu in self.seconds
        yield Chain.in_turn, self.of(Resource.card) + self.of(Resource.cpu) - self.alongside if both else 0.0

    @property
    def chain(self) -> Chain | None:
        """What the work waits for longer than for its slowest resource, where its amounts are numbers; None where that is nothing."""
        chain, seconds = max(self._chains(), key=lambda one: float(one[1]))
        return chain if seconds > max(self.by_resource().values()) else None

    def lasts(self) -> float:
        """Seconds of the work, where its amounts are numbers: the longest of the least."""
        return float(max(self.least()))

    def without(self, *idle: Resource) -> Price:
        """The same with ``idle`` taking no time."""
        return replace(self, seconds={r: s for r, s in self.seconds.items() if r not in idle})

    @property
    def slowest(self) -> Resource:
        """The resource that is busy longest."""
        found = self.by_resource()
        return max(found, key=found.__getitem__)

    def by_resource(self) -> dict[Resource, float]:
        """Seconds of all resources, 0 of those that are idle."""
        return {resource: self.of(resource) for resource in Resource}


NOTHING = Price()


def total(prices: Iterable[Price]) -> Price:
    """Of all of ``prices``."""
    found = Price()
    for price in prices:
        found += price
    return found


def _is_any(amount: Amount) -> bool:
    """Whether it may be more than 0: an expression may."""
    return amount > 0 if isinstance(amount, _NUMBERS) else True


def _sum(one: Mapping[Key, Amount], other: Mapping[Key, Amount]) -> Mapping[Key, Amount]:
    if not one or not other:
        return one or other
    found = dict(one)
    for key, amount in other.items():
        found[key] = found[key] + amount if key in found else amount
    return found
