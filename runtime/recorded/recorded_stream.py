"""How a recorded pass meets streamed units: each has its slot for good, and what is copied when was settled when the pass was recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import nn

from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.policy.rounds import Rounds
from penstock.runtime.memory.device import Event
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.model.binding import WeightStream, parameters
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.handover import Copied, Handover
from penstock.runtime.store.base import TensorLayout

EXACTLY = 16
"""One pass in so many has its times read one by one, which takes the host a millisecond; those between are taken to be like it."""


class Recorder(Protocol):
    """A stream of kernels and chains of copies while they are recorded; after each launch a point has a time. A chain's copies come one
    after the other. Chains wait for nothing of each other; on an H200 they take the link in turns."""

    @property
    def begin(self) -> Event: ...
    @property
    def results(self) -> Event: ...
    def copy(self, chain: str, dst: torch.Tensor, src: torch.Tensor) -> None: ...
    def copy_event(self, chain: str) -> Event: ...
    def compute_event(self) -> Event: ...
    def copy_waits(self, chain: str, event: Event) -> None: ...
    def compute_waits(self, event: Event) -> None: ...
    def words(self, count: int) -> torch.Tensor:
        """Zeros, int32 [count, n]: a word a row, its first number, which card and host see."""

    def compute_takes(self, word: torch.Tensor) -> None:
        """Kernels recorded next begin once ``word`` is 1, and make it 0."""

    def copies_take(self, chain: str, word: torch.Tensor) -> None:
        """The same of copies."""

    def follow(self, chain: str, event: Event) -> Event:
        """Behind a launch: what ``chain`` is given next, not recorded, begins behind ``event`` of that launch, and behind all copies of the
        chain -> the point where it begins."""

    def give(self, chain: str, word: torch.Tensor) -> Event:
        """Behind a launch: ``word`` becomes 1 when ``chain`` has copied all that it was given -> that point."""

    def wait_results(self) -> None:
        """Block until the last launch's kernels are over."""

    def wait(self) -> None:
        """Block until the last launch is over, and what was copied behind it."""

    def time_of(self, point: Event) -> float: ...


class _Computed(NamedTuple):
    unit: Unit
    arrived: Event | None
    """The copy that it waited for; None where it lay there when the pass began."""
    left: Event
    brought_by: str = "h2d"
    """What it waited for."""


class _Next(NamedTuple):
    """A unit that the next pass begins with, and the kernels that read its slot last in this one."""

    number: int
    chain: str
    left: Event


class Streamed(NamedTuple):
    """A unit that comes in each pass: where it lies in DRAM, for good, and how it lies in VRAM."""

    unit: Unit
    source: torch.Tensor
    segments: Sequence[Segment]
    tensors: Sequence[TensorLayout]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def copy(self, into: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Bring it into a slot by ``copy(dst, src)``."""
        for s in self.segments:
            copy(into[s.dst : s.dst + s.nbytes], self.source[s.src : s.src + s.nbytes])


def chain_of(unit: Unit) -> str:
    """The chain of copies that brings ``unit``."""
    return unit.ring_class


class RecordedStream:
    """Feeds a pass that is being recorded, and books those that are launched afterwards.

    A unit's copy is recorded when the unit that had its slot is left, and compute waits for it where it is entered. Units of one slot class
    are a chain of copies. Copies for the next pass are the last of their chain. They are no part of what is recorded: each launch is
    followed by them, so that the next one need not wait for all of them, and the link does not for it. A word a unit says that it has come,
    and one a chain that all have. A launch that ends a run of them is followed by none: the link is free for whoever comes next. A stream
    ``like`` another, over the same units and slots, goes on from its launches, and it from this one's.
    """

    def __init__(
        self,
        streamed: Sequence[Streamed],
        slots: Mapping[str, Sequence[torch.Tensor]],
        recorder: Recorder,
        ledger: Ledger,
        every: int = EXACTLY,
        others: WeightStream | None = None,
        like: RecordedStream | None = None,
    ):
        self.rounds = Rounds([s.unit.ring_class for s in streamed], {name: len(buffers) for name, buffers in slots.items()})
        self._streamed, self._slots = streamed, slots
        self.units = [s.unit for s in streamed]
        self._index = {unit: i for i, unit in enumerate(self.units)}
        self._recorder, self._ledger, self._every, self._others = recorder, ledger, every, others
        self._arrived: dict[int, Event] = {}
        self._computed: list[_Computed] = []
        self._copied: list[Copied] = []
        self._next: list[_Next] = []
        chains = dict.fromkeys(map(chain_of, self.units))
        names: list[int | str] = [*self.rounds.first, *chains]
        self._left: Handover = Handover(recorder.words(len(names)), names) if like is None else like._left
        self._begun: set[str] = set()
        """Chains of which a copy was recorded."""
        self._launched = 0
        self._booked = True
        self._like = _Spent(0.0, {}, 0.0, 0.0)

    @property
    def nbytes(self) -> int:
        """That a pass copies."""
        return sum(s.nbytes for s in self._streamed)

    def buffer(self, i: int) -> torch.Tensor:
        """The slot of the ``i``-th streamed unit."""
        name, index = self.rounds.place(i)
        return self._slots[name][index]

    def begin_pass(self) -> None:
        for found in (self._arrived, self._computed, self._copied, self._next, self._begun):
            found.clear()

    def enter(self, unit: Unit) -> Mapping[str, nn.Parameter]:
        i = self._index.get(unit)
        if i is None:
            return {} if self._others is None else self._others.enter(unit)
        if i in self._arrived:
            self._recorder.compute_waits(self._arrived[i])
        else:
            self._recorder.compute_takes(self._left.word[i])
            self._arrived[i] = self._recorder.compute_event()
        return parameters(self._streamed[i].tensors, self.buffer(i))

    def leave(self, unit: Unit) -> None:
        i = self._index.get(unit)
        if i is None:
            return
        left, chain, coming = self._recorder.compute_event(), chain_of(unit), self.rounds.behind(i)
        self._computed.append(_Computed(unit, self._arrived[i], left))
        if coming <= i:
            self._next.append(_Next(coming, chain, left))
            return
        if chain not in self._begun:
            self._begun.add(chain)
            self._recorder.copies_take(chain, self._left.word[chain])
        self._recorder.copy_waits(chain, left)
        self._copy(chain, coming)
        self._arrived[coming] = end = self._recorder.copy_event(chain)
        self._copied.append(Copied(self._streamed[coming].unit, self._streamed[coming].nbytes, left, end))

    def point(self) -> Event:
        """Behind the kernels recorded so far."""
        return self._recorder.compute_event()

    def handed_over(self, unit: Unit, asked: Event, back: Event) -> None:
        """From ``asked`` until ``back`` the CPU computes ``unit``."""
        self._computed += [_Computed(unit, None, asked), _Computed(unit, back, back, "cpu")]

    def end_pass(self) -> None:
        """The rest of the pass, the head, is booked with the last unit."""

    def all_there(self) -> None:
        """The next launch begins when what it begins with lies in the slots, whoever brought it."""
        self._left.words.fill_(1)
        self._book_behind()
        self._left.ended, self._left.since_s = False, 0.0

    @property
    def brought(self) -> Sequence[int]:
        """Units that lie in their slots when the last launch is over, and the copies behind it."""
        return () if self._left.ended else self.rounds.first

    def launched(self, ends: bool = False) -> None:
        """A recorded pass was launched; the one before was booked. Copies for the next one follow it, unless it ``ends`` a run of them:
        then others have the slots before the next launch."""
        self._launched += 1
        self._booked, self._left.ended = False, ends
        self._left.before, self._left.behind = self._left.behind, []
        if ends:
            return
        for i, chain, left in self._next:
            begin = self._recorder.follow(chain, left)
            self._copy(chain, i)
            end = self._recorder.give(chain, self._left.word[i])
            self._left.behind.append(Copied(self._streamed[i].unit, self._streamed[i].nbytes, begin, end))
        for chain in self._begun:
            self._recorder.give(chain, self._left.word[chain])

    def _copy(self, chain: str, i: int) -> None:
        self._streamed[i].copy(self.buffer(i), partial(self._recorder.copy, chain))

    def settle(self) -> float | None:
        """Book the pass that was launched last, once its results are there -> its seconds; None where there is nothing to book."""
        if self._booked:
            return None
        self._booked = True
        self._recorder.wait_results()
        begun_s, over_s = (self._recorder.time_of(point) for point in (self._recorder.begin, self._recorder.results))
        if self._launched % self._every == 1 or self._every == 1:
            self._like = _Spent(
                *self._book_compute(begun_s, over_s), self._book_copies([*self._left.before, *self._copied]), over_s - begun_s
            )
        else:
            self._book_alike(begun_s, over_s)
        self._left.since_s = self._left.since_s or begun_s
        if self._left.ended:
            self._book_first()
        return over_s - begun_s

    def finish(self) -> None:
        """No launch follows: book the last one, and what was copied behind it."""
        self.settle()
        self._book_behind()

    def _book_behind(self) -> None:
        self._recorder.wait()
        self._book_copies(self._left.behind)
        self._left.behind = []

    def _book_first(self) -> None:
        """What a run of launches began with: others brought it, right before the first one. Taken to be as fast as the copies of a pass."""
        nbytes = sum(self._streamed[i].nbytes for i in self.rounds.first)
        seconds = self._like.copies_s * nbytes / self.nbytes if nbytes else 0.0
        self._ledger.add("h2d", "pass", self._left.since_s - seconds, self._left.since_s, nbytes)

    def _book_compute(self, begun_s: float, over_s: float) -> tuple[float, dict[str, float]]:
        """Seconds of compute, of the pass's ``over_s - begun_s``, and of waiting by what was waited for."""
        idle_s, busy_s = begun_s, 0.0
        waits = dict.fromkeys((one.brought_by for one in self._computed if one.arrived is not None), 0.0)
        for one in self._computed:
            left_s = self._recorder.time_of(one.left)
            if one.arrived is not None:
                arrived_s = min(self._recorder.time_of(one.arrived), left_s)
                self._ledger.waited("compute", one.brought_by, str(one.unit), idle_s, arrived_s)
                waits[one.brought_by] += max(0.0, arrived_s - idle_s)
                idle_s = max(idle_s, arrived_s)
            self._ledger.add("compute", str(one.unit), idle_s, left_s)
            busy_s += left_s - idle_s
            idle_s = left_s
        self._ledger.add("compute", "head.0", idle_s, over_s)
        return busy_s + over_s - idle_s, waits

    def _book_copies(self, copies: Sequence[Copied]) -> float:
        """Seconds in which the link was busy with ``copies``, which are over."""
        times = [(chain_of(one.unit), self._recorder.time_of(one.cleared), self._recorder.time_of(one.end)) for one in copies]
        found = list(zip(moved(times), copies, strict=True))
        idle_s, busy_s = min((start_s for (start_s, _), _ in found), default=0.0), 0.0
        for (start_s, end_s), one in sorted(found, key=lambda pair: pair[0]):
            self._ledger.waited("h2d", "compute", str(one.unit), idle_s, start_s)
            busy_s += max(0.0, end_s - max(start_s, idle_s))
            idle_s = max(idle_s, end_s)
        since_s = 0.0
        for (start_s, end_s), one in sorted(found, key=lambda pair: pair[0][1]):
            self._ledger.add("h2d", str(one.unit), min(max(start_s, since_s), end_s), end_s, one.nbytes)
            since_s = end_s  # one span after the other, also of what was copied at the same time
        return busy_s

    def _book_alike(self, begun_s: float, over_s: float) -> None:
        """A pass whose parts took the same shares of it as those of the last one that was read."""
        scale = (over_s - begun_s) / self._like.pass_s if self._like.pass_s else 0.0
        compute_s, copies_s = self._like.compute_s * scale, self._like.copies_s * scale
        self._ledger.add("compute", "pass", begun_s, begun_s + compute_s)
        since_s = begun_s + compute_s
        for source, waited_s in self._like.waits.items():
            self._ledger.waited("compute", source, "pass", since_s, since_s + waited_s * scale)
            since_s += waited_s * scale
        if copied := [*self._left.before, *self._copied]:
            self._ledger.add("h2d", "pass", begun_s, begun_s + copies_s, sum(one.nbytes for one in copied))
            self._ledger.waited("h2d", "compute", "pass", begun_s + copies_s, over_s)


def moved(copies: Sequence[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """Begin and end of ``copies``, each a chain, when its slot was cleared and when it ended: a chain's copies come one after the other."""
    over: dict[str, float] = {}
    found = []
    for chain, cleared_s, end_s in copies:
        start_s = min(end_s, max(cleared_s, over.get(chain, cleared_s)))
        over[chain] = end_s
        found.append((start_s, end_s))
    return found


class _Spent(NamedTuple):
    compute_s: float
    waits: Mapping[str, float]
    """Seconds in which compute waited, by what it waited for."""
    copies_s: float
    pass_s: float
