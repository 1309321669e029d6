"""Parts of experts that come from the SSD, and their copies to VRAM by the threads that read them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from penstock.runtime.experts.dram_experts import DramExperts
from penstock.runtime.experts.expert_copies import ExpertCopies
from penstock.runtime.experts.expert_fetch import CarriedPart, Key
from penstock.runtime.memory.device import Event
from penstock.runtime.memory.pieces import Segment, within
from penstock.runtime.moving.device_layout import DeviceLayout
from penstock.runtime.reading.native.native_carrier import NativeCarrier


class Carried(NamedTuple):
    """What the SSD brings to ``dram_slot`` and readers copy to ``slot``."""

    slot: int
    dram_slot: int
    parts: Sequence[CarriedPart]


class CarriedExperts:
    """Experts of ``layouts`` that come through ``dram``. Readers queue copies of their parts where they and the card's driver can:
    :attr:`possible`. Otherwise the consumer does, by :meth:`segments_of`."""

    def __init__(self, layouts: Mapping[Key, DeviceLayout], copies: ExpertCopies, dram: DramExperts):
        self._layouts, self._copies, self._dram, self._device = layouts, copies, dram, copies.device
        calls = self._device.driver_calls()
        self._carrier = None if calls is None else dram.carrier(calls)
        self._begin = [slot.data_ptr() for slot in copies.slots]
        self._segments: dict[tuple[Key, int], Sequence[Segment]] = {}
        self._words: dict[tuple[Key, int], tuple[array[int], int]] = {}
        """The same as a carrier takes them, and their bytes."""
        self._begun: dict[int, Carried] = {}
        self._came: list[tuple[Key, Carried, Event]] = []

    @property
    def possible(self) -> bool:
        return self._carrier is not None

    def prepare(self) -> None:
        """Know all parts' copies, some 10 us each: a step would wait for it."""
        known: Callable[[Key, int], object] = self.segments_of if self._carrier is None else self._words_of
        for key in self._layouts if not self._dram.still else ():
            for number in range(len(self._dram.parts(*key))):
                known(key, number)

    def segments_of(self, key: Key, number: int) -> Sequence[Segment]:
        """Of a part that the SSD brings."""
        found = self._segments.get((key, number))
        if found is None:
            segments, parts = self._layouts[key].segments, self._dram.parts(*key)
            pieces = [s for extent in parts[number] for s in within(segments, extent.dest, extent.nbytes)]
            found = self._segments[key, number] = segments if len(parts) == 1 else pieces
        return found

    def carry(self, take: Callable[[int, int], int], key: Key, source: torch.Tensor) -> Sequence[CarriedPart] | None:
        """Have readers copy what they bring of ``key`` to ``source`` on to the slot that ``take`` gives it; None where they cannot."""
        carrier = self._carrier
        if carrier is None or not self._device.in_one_piece(source):
            return None
        slot, parts = take(*key), []
        self._copies.make_way(slot)
        for number in range(len(self._dram.parts(*key))):
            segments, nbytes = self._words_of(key, number)
            event, handle = self._device.event_ahead()
            parts.append(CarriedPart(carrier.carry(segments, self._begin[slot], handle), event, nbytes))
        self._begun[key[1]] = Carried(slot, self._dram.place(*key)[0], parts)
        return parts

    def begun(self) -> dict[int, Carried]:
        """Experts that :meth:`carry` was asked for since the last call."""
        begun, self._begun = self._begun, {}
        return begun

    def all_came(self, layer: int, expert: int, carried: Carried) -> None:
        """Readers have queued all copies of ``expert``. Call :meth:`settle` before its slot in DRAM is given back."""
        self._came.append(((layer, expert), carried, self._copies.carried(carried.slot, carried.parts)))

    def settle(self) -> None:
        """Book what has come since the last call: nothing that is computed waits for it."""
        if self._came:
            came, self._came = self._came, []
            for key, carried, over in came:
                self._dram.read_until((carried.dram_slot,), partial(self._device.host_waits, over))
                self._copies.book(key, carried.parts)

    def close(self) -> None:
        """Nothing is queued any more by readers."""
        if self._carrier is not None:
            self._carrier.close()

    def _words_of(self, key: Key, number: int) -> tuple[array[int], int]:
        found = self._words.get((key, number))
        if found is None:
            segments = self.segments_of(key, number)
            found = self._words[key, number] = NativeCarrier.words(segments), sum([s.nbytes for s in segments])
        return found
