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
        """What the weights' copy stream is given next begins when the last launch is over."""


class SlotTurns:
    """``ring`` and ``recorded`` over the same slots. All that ``streamed`` through either lies in DRAM for good; what lies in a slot passes
    the link no more."""

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
        with self._device.copying():
            self._device.copy_waits(self._device.compute_event())
            self._fill(dict(self._ring.ahead()))
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

    def _fill(self, lies: Mapping[Unit, torch.Tensor]) -> None:
        """Queue the copies that bring each unit that the pass begins with to its slot. What ``lies`` in another slot comes from there, in a
        hundredth of the link's time."""
        targets = {i: self._recorded.buffer(i) for i in self._recorded.rounds.first}
        here = {i: lies[unit] for i in targets if (unit := self._recorded.units[i]) in lies}
        moves = {i: slot for i, slot in here.items() if slot.data_ptr() != targets[i].data_ptr()}
        absent = [i for i in targets if i not in here]
        while moves:
            taken = {slot.data_ptr() for slot in moves.values()}
            i = next((i for i in moves if targets[i].data_ptr() not in taken), None)
            if i is None:  # each lies where another one belongs
                i, _ = moves.popitem()
                absent.append(i)
            else:
                self._device.copy(targets[i], moves.pop(i))
        for i in sorted(absent):
            self._streamed[self._recorded.units[i]].copy(targets[i], self._device.copy)

    def _bring(self, unit: Unit, into: torch.Tensor) -> Event:
        with self._device.copying():
            self._streamed[unit].copy(into, self._device.copy)
        return self._device.copy_event()
