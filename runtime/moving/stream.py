"""The two ways in which compute meets streamed units: straight from DRAM on the CPU, through the VRAM ring on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.model.binding import parameters
from penstock.runtime.moving.dram_side import DramTier
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.moving.ring import VramRing
from penstock.runtime.store.base import TensorLayout

_NOTHING: Mapping[str, nn.Parameter] = {}
MOST_UNBOOKED = 256
"""Units whose kernels wait to be booked: to book many at once takes the host a fraction of what it takes to book each with cold caches."""


class HostStream:
    """Two tiers: a unit's parameters are views of its DRAM slot. Whatever a pass does that is not waiting counts as computing, of the unit
    that comes next: norms and residuals before it, too."""

    def __init__(self, dram: DramTier, layouts: Mapping[Unit, Sequence[TensorLayout]], ledger: Ledger):
        self._dram = dram
        self._layouts = layouts
        self._ledger = ledger
        self._views: dict[tuple[Unit, int], dict[str, nn.Parameter]] = {}
        self._unit: Unit | None = None
        self._since = 0.0
        """Of what is computed now, the begin; of a wait, its begin."""

    def begin_pass(self) -> None:
        self._since = self._ledger.now()

    def enter(self, unit: Unit) -> Mapping[str, nn.Parameter]:
        stats = self._dram.cache.stats
        before_s = stats.wait_s
        self._unit = unit
        slot, buffer = self._dram.acquire(unit)
        waited_s = stats.wait_s - before_s
        if waited_s:
            now = self._ledger.now()
            self._computed(now - waited_s)
            self._waited(now)
        views = self._views.get((unit, slot))
        if views is None:
            views = self._views[unit, slot] = parameters(self._layouts[unit], buffer)
        return views

    def pause(self) -> None:
        """The unit that was entered last computes no further until :meth:`resume`: an expert of it has not arrived."""
        self._computed(self._ledger.now())

    def idle(self) -> None:
        """The same where nothing is being computed."""
        self.pause()

    def resume(self, arrival: Event | None = None) -> None:
        self._waited(self._ledger.now())

    def leave(self, unit: Unit) -> None:
        self._computed(self._ledger.now())
        self._dram.release(unit)

    def end_pass(self) -> None:
        """What comes behind the last unit: the head."""
        self._unit = Unit("head", 0)
        self._computed(self._ledger.now())

    def _computed(self, until: float) -> None:
        self._ledger.add("compute", str(self._unit), self._since, until)
        self._since = until

    def _waited(self, until: float) -> None:
        self._ledger.waited("compute", "ssd", str(self._unit), self._since, until)
        self._since = until

    def settle(self) -> None:
        """Nothing is outstanding: the CPU has finished what it was asked."""

    def close(self) -> None:
        self._dram.cache.close()
        self._views.clear()


_Timed = tuple[Unit, float, Event | None, Event]
"""A unit's kernels: the host time at which its pass began, the copy that they waited for (None: resident), and their end. A plain one: each
layer's host makes some before its next launch."""


@dataclass(slots=True)
class _Inside:
    """A unit that is entered: its copy, or what was waited for since."""

    unit: Unit
    arrival: Event | None
    streamed: bool


class RingStream:
    """Three tiers: a streamed unit's parameters are views of its ring slot; a resident unit's were bound for good.

    An event behind a unit's kernels times them; nobody waits for it. Time between two units, if nothing is waited for, counts as compute
    of the second: norms, residuals, and a device that has run dry because the host launches slowly. Of resident units beside each other the
    last one alone has an event, and counts for all: the driver takes the host longer for one than Python for a unit. Where spans are
    kept each has its own.
    """

    def __init__(self, ring: VramRing, dram: DramTier, layouts: Mapping[Unit, Sequence[TensorLayout]], device: CopyDevice, ledger: Ledger):
        self._ring = ring
        self._dram = dram
        self._layouts = layouts
        self._device = device
        self._ledger = ledger
        self._views: dict[tuple[Unit, int], dict[str, nn.Parameter]] = {}
        self._inside: deque[_Inside] = deque()
        """The units that are entered, in their order."""
        self._each = ledger.keeps_spans
        self._behind: _Inside | None = None
        """The resident unit that was left last, while it has no event."""
        self._left = Unit("head", 0)
        """The unit that was left last."""
        self._between: Event | None = None
        """What was waited for since."""
        self._paused = False
        self._timing: deque[_Timed] = deque()
        self._begun_at = 0.0
        self._idle_since = 0.0

    def begin_pass(self) -> None:
        self._begun_at = self._ledger.now()
        self._inside.clear()
        self._behind = None
        self._ring.begin_pass()

    def enter(self, unit: Unit) -> Mapping[str, nn.Parameter]:
        if unit not in self._layouts:
            self._inside.append(_Inside(unit, self._between, False))
            self._between = None
            return _NOTHING
        self._mark()
        _, buffer = self._ring.enter(unit)
        self._inside.append(_Inside(unit, self._ring.entered_after or self._between, True))
        self._between = None
        key = unit, buffer.data_ptr()
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = parameters(self._layouts[unit], buffer)
        return views

    def _mark(self) -> None:
        """What is waited for next is not waited for by the resident units before it."""
        if self._behind is not None:
            behind, self._behind = self._behind, None
            self._timing.append((behind.unit, self._begun_at, behind.arrival, self._device.compute_event()))

    def pause(self) -> None:
        """The unit that was entered last computes no further until :meth:`resume`: an expert of it has not arrived. Nothing where it
        does not already. Between two units it is another rank's layer that waits for a slice of an expert."""
        self._pause(self._device.compute_event)

    def idle(self) -> None:
        """The same where nothing is being computed: all that was issued is over."""
        self._pause(self._device.idle_point)

    def _pause(self, point: Callable[[], Event]) -> None:
        if not self._paused:
            self._paused, self._behind = True, None  # which this one's point is behind
            unit, arrival = (self._left, None) if not self._inside else (self._inside[-1].unit, self._inside[-1].arrival)
            self._timing.append((unit, self._begun_at, arrival, point()))

    def resume(self, arrival: Event | None = None) -> None:
        """Where it was paused: what is computed from now on waits for ``arrival``."""
        if self._paused:
            self._paused = False
            if self._inside:
                self._inside[-1].arrival = arrival
            else:
                self._between = arrival

    def leave(self, unit: Unit) -> None:
        inside, self._left = self._inside.popleft(), unit
        if not inside.streamed and inside.arrival is None and not self._each:
            self._behind = inside
            return
        self._behind, end = None, self._device.compute_event()
        if inside.streamed:
            self._ring.leave(unit, end)
        self._timing.append((unit, self._begun_at, inside.arrival, end))
        if len(self._timing) >= MOST_UNBOOKED:
            self.settle()

    def end_pass(self) -> None:
        """What comes behind the last unit: a head that lies on the device."""
        self._left, between, self._between, self._behind = Unit("head", 0), self._between, None, None
        self._timing.append((self._left, self._begun_at, between, self._device.compute_event()))
        self.settle()

    def settle(self) -> None:
        """Book all kernels that have finished; never blocks."""
        over = len(self._timing)
        while over and not self._device.done(self._timing[over - 1][3]):
            over -= 1
        for _ in range(over):  # what comes before what is over is over, too
            unit, begun_s, arrival, end = self._timing.popleft()
            end_s = self._device.time_of(end)
            since_s = min(max(self._idle_since, begun_s), end_s)
            if arrival is not None:
                arrived_s = min(self._device.time_of(arrival), end_s)
                self._ledger.waited("compute", "h2d", str(unit), since_s, arrived_s)
                since_s = max(since_s, arrived_s)
            self._ledger.add("compute", str(unit), since_s, end_s)
            self._idle_since = end_s

    def close(self) -> None:
        self._dram.cache.close()
        self._ring.close()
        self._views.clear()


class Rehearsal:
    """Feeds every streamed unit from the ``place`` given for it, whatever lies there: shapes are right, values are not.

    A forward pass over it loads every kernel and takes every activation once, before weights are read and times are taken.
    """

    def __init__(self, layouts: Mapping[Unit, Sequence[TensorLayout]], place: Callable[[Unit], torch.Tensor]):
        self._views = {unit: parameters(tensors, place(unit)) for unit, tensors in layouts.items()}

    def begin_pass(self) -> None:
        """Nothing moves."""

    def enter(self, unit: Unit) -> Mapping[str, nn.Parameter]:
        return self._views.get(unit, {})

    def leave(self, unit: Unit) -> None:
        """Nothing was held."""

    def end_pass(self) -> None:
        """Nothing moved."""
