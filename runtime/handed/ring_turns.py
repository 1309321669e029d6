"""Two rings over the same slots, one at a time: that of prompts, and that of steps, which stream less."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.planner.contract.decided.placement import Unit
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


class RingTurns:
    """``first``, which has been started, copies until ``second`` is asked for, and the other way round. What one has brought for its next
    pass the other goes on from, where it wants that, too. A change holds the host up until the copies that are queued are over."""

    def __init__(self, first: VramRing, second: VramRing, copies: Copies, dram: DramTier, device: CopyDevice):
        self._going, self._second = first, second
        self._copies, self._dram, self._device = copies, dram, device

    def start(self) -> None:
        """Let the second one wait for its turn."""
        self._second.pause()
        self._second.start()

    def take(self, ring: VramRing) -> None:
        """A pass of ``ring``, one of both, comes next."""
        if ring is self._going:
            return
        self._dram.cache.wait_preloaded()
        self._going.pause()
        lies = dict(self._going.ahead())
        ring.adopt(lies, self._device.compute_event(), self._bring)
        self._going = ring

    def _bring(self, unit: Unit, into: torch.Tensor) -> Event:
        with self._device.copying():
            self._device.copy_waits(self._device.compute_event())
            self._copies(unit, into)
        return self._device.copy_event()
