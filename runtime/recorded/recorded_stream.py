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
    """A stream of kernels and one of copies. While a pass is recorded, what is given here comes at each launch, in its place; else at once.
    At each launch a point is anew, with its time."""

    @property
    def begin(self) -> Event: ...
    @property
    def results(self) -> Event: ...
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None: ...
    def copy_event(self) -> Event: ...
    def compute_event(self) -> Event: ...
    def copy_waits(self, event: Event) -> None: ...
    def compute_waits(self, event: Event) -> None: ...
    def at_launch(self, act: Callable[[], None]) -> None:
        """``act`` is called at each launch, in its place: what it gives here differs from launch to launch."""

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


class RecordedStream:
    """Feeds a pass that is being recorded, and books those that are launched afterwards.

    A unit's copy comes when the unit that had its slot is left, and compute waits for it where it is entered. One stream makes all copies,
    in that order: of two streams, which waited in turns, steps took 3 to 6 % longer on H100s (docs/log.md, 2026-11-27). Those that the next
    pass begins with are given in their places, and the next launch waits for each where its unit is entered. A launch that ends a run of
    them leaves them out: the link is free for whoever comes next. A stream ``like`` another, over the same units and slots, goes on from
    its launches, and it from this one's.
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
        self._left: Handover = Handover() if like is None else like._left
        self._launched = 0
        self._booked = True
        self._like = _Spent(0.0, {}, 0.0, 0, 0.0)

    @property
    def nbytes(self) -> int:
        """That a pass copies."""
        return sum(s.nbytes for s in self._streamed)

    def buffer(self, i: int) -> torch.Tensor:
        """The slot of the ``i``-th streamed unit."""
        name, index = self.rounds.place(i)
        return self._slots[name][index]

    def begin_pass(self) -> None:
        self._arrived.clear()
        self._computed.clear()

    def enter(self, unit: Unit) -> Mapping[str, nn.Parameter]:
        i = self._index.get(unit)
        if i is None:
            return {} if self._others is None else self._others.enter(unit)
        if i in self._arrived:
            self._recorder.compute_waits(self._arrived[i])
        else:
            self._recorder.at_launch(partial(self._meet, i))
            self._arrived[i] = self._recorder.compute_event()
        return parameters(self._streamed[i].tensors, self.buffer(i))

    def _meet(self, i: int) -> None:
        """A launch comes to a unit that it begins with."""
        if i in self._left.there:
            self._recorder.compute_waits(self._left.there[i])

    def leave(self, unit: Unit) -> None:
        i = self._index.get(unit)
        if i is None:
            return
        left, coming = self._recorder.compute_event(), self.rounds.behind(i)
        self._computed.append(_Computed(unit, self._arrived[i], left))
        if coming <= i:
            self._recorder.at_launch(partial(self._bring_next, coming, left))
        else:
            copied = self._bring(coming, left)
            self._arrived[coming] = copied.end
            self._recorder.at_launch(partial(self._left.brought, copied))

    def _bring_next(self, i: int, left: Event) -> None:
        """A launch comes to where a unit is copied that the next one begins with."""
        if not self._left.ended:
            copied = self._bring(i, left)
            self._left.there[i] = copied.end
            self._left.copies.append(copied)

    def _bring(self, i: int, left: Event) -> Copied:
        """Copy the ``i``-th unit behind ``left``."""
        one = self._streamed[i]
        self._recorder.copy_waits(left)
        begin = self._recorder.copy_event()
        one.copy(self.buffer(i), self._recorder.copy)
        return Copied(one.unit, one.nbytes, begin, self._recorder.copy_event())

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
        self._book_behind()
        self._left.ended, self._left.since_s = False, 0.0

    @property
    def brought(self) -> Sequence[int]:
        """Units that lie in their slots when the last launch is over, and the copies behind it."""
        return () if self._left.ended else self.rounds.first

    def begin_launch(self, ends: bool = False) -> None:
        """A recorded pass is launched next; the one before was booked. Copies for the one behind it come with it, unless it ``ends`` a run
        of them: then others have the slots before the next launch."""
        self._left.begin_launch(ends)

    def launched(self) -> None:
        """It is, and is to be booked."""
        self._launched += 1
        self._booked = False

    def settle(self) -> float | None:
        """Book the pass that was launched last, once its results are there -> its seconds; None where there is nothing to book."""
        if self._booked:
            return None
        self._booked = True
        self._recorder.wait_results()
        begun_s, over_s = (self._recorder.time_of(point) for point in (self._recorder.begin, self._recorder.results))
        copies = self._left.take_over()
        nbytes = sum(one.nbytes for one in copies)
        if self._launched % self._every == 1 or self._every == 1 or nbytes > self._like.nbytes:  # of a run's first one, others copied some
            self._like = _Spent(*self._book_compute(begun_s, over_s), self._book_copies(copies), nbytes, over_s - begun_s)
        else:
            self._book_alike(begun_s, over_s, nbytes)
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
        self._book_copies(self._left.copies)
        self._left.copies.clear()

    def _book_first(self) -> None:
        """What a run of launches began with: others brought it, right before the first one. Taken to be as fast as the copies of a pass."""
        nbytes = sum(self._streamed[i].nbytes for i in self.rounds.first)
        seconds = self._like.copies_s * nbytes / self._like.nbytes if self._like.nbytes else 0.0
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
        idle_s, busy_s = None, 0.0
        for one in copies:
            begin_s, end_s = self._recorder.time_of(one.begin), self._recorder.time_of(one.end)
            if idle_s is not None:
                self._ledger.waited("h2d", "compute", str(one.unit), idle_s, begin_s)
            self._ledger.add("h2d", str(one.unit), begin_s, end_s, one.nbytes)
            busy_s += end_s - begin_s
            idle_s = end_s
        return busy_s

    def _book_alike(self, begun_s: float, over_s: float, nbytes: int) -> None:
        """A pass whose parts took the same shares of it as those of the last one that was read."""
        scale = (over_s - begun_s) / self._like.pass_s if self._like.pass_s else 0.0
        compute_s, copies_s = self._like.compute_s * scale, self._like.copies_s * scale
        self._ledger.add("compute", "pass", begun_s, begun_s + compute_s)
        since_s = begun_s + compute_s
        for source, waited_s in self._like.waits.items():
            self._ledger.waited("compute", source, "pass", since_s, since_s + waited_s * scale)
            since_s += waited_s * scale
        if nbytes:
            self._ledger.add("h2d", "pass", begun_s, begun_s + copies_s, nbytes)
            self._ledger.waited("h2d", "compute", "pass", begun_s + copies_s, over_s)


class _Spent(NamedTuple):
    compute_s: float
    waits: Mapping[str, float]
    """Seconds in which compute waited, by what it waited for."""
    copies_s: float
    nbytes: int
    """Copied meanwhile."""
    pass_s: float
