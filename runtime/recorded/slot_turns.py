"""The ring's slots, used by the ring and by recorded passes in turn: what the one has brought for the next pass, the other goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.moving.dram_side import DramTier
from penstock.runtime.moving.ring import VramRing
from penstock.runtime.recorded.recorded_stream import RecordedStream, Streamed


class Launched(Protocol):
    """Recorded passes beside the copy stream."""

    def hold(self) -> None:
        """The next launch begins behind what the weights' copy stream was given."""

    def yield_copies(self) -> None:
        """What the weights' copy stream is given next begins when the last launch is over, and the copies behind it."""


class SlotTurns:
    """``ring`` and ``recorded`` over the same slots. All that ``streamed`` through either lies in DRAM for good; nothing is copied twice
    that lies where it is wanted."""

    def __init__(
        self,
        ring: VramRing,
        recorded: RecordedStream,
        streamed: Mapping[Unit, Streamed],
        launched: Launched,
        dram: DramTier,
        device: CopyDevice,
    ):
        self._streamed = streamed
        self._ring, self._recorded, self._launched = ring, recorded, launched
        self._dram, self._device = dram, device
        self._taken = False

    def take(self) -> None:
        """A recorded pass comes next."""
        if self._taken:
            return
        self._dram.cache.wait_preloaded()
        self._ring.pause()
        lies = {unit: buffer.data_ptr() for unit, buffer in self._ring.ahead()}
        units = self._recorded.units
        with self._device.copying():
            self._device.copy_waits(self._device.compute_event())
            for i in self._recorded.rounds.first:
                if lies.get(units[i]) != self._recorded.buffer(i).data_ptr():
                    self._streamed[units[i]].copy(self._recorded.buffer(i), self._device.copy)
        self._launched.hold()
        self._recorded.all_there()
        self._taken = True

    def give(self) -> None:
        """The ring comes next. May be said as soon as the last recorded pass is launched."""
        if not self._taken:
            return
        self._launched.yield_copies()
        lies = {self._recorded.units[i]: self._recorded.buffer(i) for i in self._recorded.brought}
        self._ring.adopt(lies, self._device.copy_event(), self._bring)
        self._taken = False

    def _bring(self, unit: Unit, into: torch.Tensor) -> Event:
        with self._device.copying():
            self._streamed[unit].copy(into, self._device.copy)
        return self._device.copy_event()
