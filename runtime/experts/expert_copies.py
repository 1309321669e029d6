"""Copies of experts into slots of VRAM, each behind whatever used its slot before."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from penstock.planner.common.timeline.spans import EXPERTS
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.experts.expert_fetch import Key
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.memory.pieces import Parts, Segment
from penstock.runtime.moving.booking import Booking, Queued
from penstock.runtime.moving.ledger import Ledger


class ExpertCopies:
    """The copy stream of ``device`` and the events at both ends of each of ``slots``. One caller at a time."""

    def __init__(self, slots: Sequence[torch.Tensor], device: CopyDevice, ledger: Ledger):
        self.slots = slots
        self.device = device
        self._booking = Booking(device, ledger, EXPERTS)
        self._queued: deque[Queued] = deque()
        self._into, self._from = Parts(), Parts()
        self._arrived: dict[int, Event] = {}
        self._left: dict[int, Event] = {}

    def copying(self) -> AbstractContextManager[object]:
        """Inside, experts may be copied. To change streams for each takes the host as long as a copy."""
        return self.device.copying()

    def copy(self, key: Key, slot: int, dram_slot: int, source: torch.Tensor, segments: Iterable[Segment]) -> Event:
        """Queue copies of ``segments`` of an expert from ``source``, the bytes of ``dram_slot``, into ``slot``. They wait for kernels that
        read the slot. Returns the event behind the last copy."""
        left = self._left.pop(slot, None)
        if left is not None:
            self.device.copy_waits(left)
        issued_s, nbytes = time.perf_counter(), 0
        for s in segments:
            into = self._into.part((slot, s.dst, s.nbytes), self.slots[slot], s.dst, s.nbytes)
            self.device.copy(into, self._from.part((dram_slot, s.dst, s.nbytes), source, s.src, s.nbytes))
            nbytes += s.nbytes
        over = self._arrived[slot] = self.device.copy_event()
        self._queued.append(Queued(issued_s, over, Unit("expert", *key), nbytes, last=False, cleared=None))
        return over

    def lies_in(self, slots: Iterable[int]) -> None:
        """They were filled by somebody else."""
        self._arrived |= dict.fromkeys(slots, self.device.copy_event())

    def arrival(self, slot: int) -> Event | None:
        """Behind the last copy into ``slot``, for what computes with it next; None where that has waited for it before."""
        return self._arrived.pop(slot, None)

    def left(self, slots: Iterable[int]) -> None:
        """What computes with ``slots`` is queued."""
        self._left |= dict.fromkeys(slots, self.device.compute_event())

    def settle(self) -> None:
        """Book all copies that are over; never blocks."""
        while self._queued and self.device.done(self._queued[0].end):
            self._booking.book(self._queued.popleft())
