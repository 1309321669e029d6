"""The two ways in which compute meets streamed units: straight from DRAM on the CPU, through the VRAM ring on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.model.binding import parameters
from penstock.runtime.moving.dram_side import DramTier
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.moving.ring import VramRing
from penstock.runtime.store.base import TensorLayout

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


class _Timed(NamedTuple):
    """A unit's kernels: the host time at which its pass began, the copy that they waited for (None: resident), and their end."""

    unit: Unit
    begun_s: float
    arrival: Event | None
    end: Event


class RingStream:
    """Three tiers: a streamed unit's parameters are views of its ring slot; a resident unit's were bound for good.

    An event behind each unit's kernels times them; nobody waits for it. Time between two units, if nothing is waited for, counts as compute
    of the second: norms, residuals, and a device that has run dry because the host launches slowly.
    """

    def __init__(self, ring: VramRing, dram: DramTier, layouts: Mapping[Unit, Sequence[TensorLayout]], device: CopyDevice, ledger: Ledger):
        self._ring = ring
        self._dram = dram
        self._layouts = layouts
        self._device = device
        self._ledger = ledger
        self._views: dict[tuple[Unit, int], dict[str, nn.Parameter]] = {}
        self._arrivals: dict[Unit, Event | None] = {}
        """Of the units that are entered: the copy that each waited for."""
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
        self._arrivals.clear()
        self._ring.begin_pass()

    def enter(self, unit: Unit) -> Mapping[str, nn.Parameter]:
        views: dict[str, nn.Parameter] = {}
        self._arrivals[unit], self._between = self._between, None
        if unit in self._layouts:
            _, buffer = self._ring.enter(unit)
            self._arrivals[unit] = self._ring.entered_after or self._arrivals[unit]
            key = unit, buffer.data_ptr()
            found = self._views.get(key)
            views = self._views[key] = parameters(self._layouts[unit], buffer) if found is None else found
        return views

    def pause(self) -> None:
        """The unit that was entered last computes no further until :meth:`resume`: an expert of it has not arrived. Nothing where it
        does not already. Between two units it is another rank's layer that waits for a slice of an expert."""
        self._pause(self._device.compute_event)

    def idle(self) -> None:
        """The same where nothing is being computed: all that was issued is over."""
        self._pause(self._device.idle_point)

    def _pause(self, point: Callable[[], Event]) -> None:
        if not self._paused:
            self._paused, inside = True, next(reversed(self._arrivals), None)
            arrival = None if inside is None else self._arrivals[inside]
            self._timing.append(_Timed(inside or self._left, self._begun_at, arrival, point()))

    def resume(self, arrival: Event | None = None) -> None:
        """Where it was paused: what is computed from now on waits for ``arrival``."""
        if self._paused:
            self._paused, inside = False, next(reversed(self._arrivals), None)
            if inside is None:
                self._between = arrival
            else:
                self._arrivals[inside] = arrival

    def leave(self, unit: Unit) -> None:
        end = self._device.compute_event()
        if unit in self._layouts:
            self._ring.leave(unit, end)
        self._timing.append(_Timed(unit, self._begun_at, self._arrivals.pop(unit), end))
        self._left = unit
        if len(self._timing) >= MOST_UNBOOKED:
            self.settle()

    def end_pass(self) -> None:
        """What comes behind the last unit: a head that lies on the device."""
        self._left, between, self._between = Unit("head", 0), self._between, None
        self._timing.append(_Timed(self._left, self._begun_at, between, self._device.compute_event()))
        self.settle()

    def settle(self) -> None:
        """Book all kernels that have finished; never blocks."""
        over = len(self._timing)
        while over and not self._device.done(self._timing[over - 1].end):
            over -= 1
        for _ in range(over):  # what comes before what is over is over, too
            timed = self._timing.popleft()
            end_s = self._device.time_of(timed.end)
            since_s = min(max(self._idle_since, timed.begun_s), end_s)
            if timed.arrival is not None:
                arrived_s = min(self._device.time_of(timed.arrival), end_s)
                self._ledger.waited("compute", "h2d", str(timed.unit), since_s, arrived_s)
                since_s = max(since_s, arrived_s)
            self._ledger.add("compute", str(timed.unit), since_s, end_s)
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
