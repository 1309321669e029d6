"""Two rings over the same slots, one at a time: that of prompts, and that of steps, which stream less."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.policy.walk import Walk, Walker
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.moving.dram_side import DramTier
from penstock.runtime.moving.ring import VramRing

Copies = Callable[[Unit, torch.Tensor], None]
"""Queues the copies that bring a unit into a slot."""


class Standing:
    """Units where they lie in DRAM for good: ``ring.UnitSource``, which no order of visits is kept for."""

    def __init__(self, dram: DramTier):
        self._dram = dram

    def arrived(self, unit: Unit) -> bool:
        return True

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        return 0, self._dram.stays(unit)

    def release(self, unit: Unit) -> None:
        """It stays."""


class Walked:
    """Units of which some pass through DRAM, as one of two rings asks for them: ``ring.UnitSource``. What stays is copied from where it
    lies; DRAM hears of each unit once a pass all the same."""

    def __init__(self, walk: Walk, dram: DramTier):
        self._walker, self._dram = Walker(walk), dram
        self._passing = walk.passing

    def arrived(self, unit: Unit) -> bool:
        return unit not in self._passing or self._dram.arrived(unit)

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        for each in self._walker.reach(unit):
            if each in self._passing:
                return self._dram.acquire(each)
            self._dram.acquire(each)
            self._dram.release(each)
        return 0, self._dram.stays(unit)

    def release(self, unit: Unit) -> None:
        if unit in self._passing:
            self._dram.release(unit)


class RingTurns:
    """``first``, which has been started, copies until ``second`` is asked for, and the other way round. What one has brought for its next
    pass the other goes on from, where it wants that, too. A change holds the host up until the copies that are queued are over. ``walk``:
    what both ask DRAM for, where some units pass through it."""

    def __init__(self, first: VramRing, second: VramRing, copies: Copies, dram: DramTier, device: CopyDevice, walk: Walk | None = None):
        self._going, self._second = first, second
        self._copies, self._dram, self._device, self._walk = copies, dram, device, walk

    def start(self) -> None:
        """Let the second one wait for its turn."""
        self._second.pause()
        self._second.start()

    def take(self, ring: VramRing) -> None:
        """A pass of ``ring``, one of both, comes next."""
        if self._walk is not None:
            self._walk.begin_pass()
        if ring is self._going:
            return
        if self._walk is None:
            self._dram.cache.wait_preloaded()
        else:
            self._dram.cache.wait_for(self._walk.stay)
        self._going.pause()
        lies = dict(self._going.ahead())
        ring.adopt(lies, self._device.compute_event(), self._bring)
        self._going = ring

    def _bring(self, unit: Unit, into: torch.Tensor) -> Event:
        with self._device.copying():
            self._device.copy_waits(self._device.compute_event())
            self._copies(unit, into)
        return self._device.copy_event()
