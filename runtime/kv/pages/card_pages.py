"""Records of pages in transit between page-locked DRAM and the slots of a pool in VRAM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from penstock.runtime.kv.pages.slot_bytes import SlotBytes
from penstock.runtime.memory.device import CopyDevice, Event


class CardPages:
    """``bounce`` is VRAM for whole records, uint8 [pages, bytes].

    A record comes into ``bounce`` as one copy on a stream of its own. One kernel then brings it to its slot, ordered before what computes
    with it, while the next record is copied. The way back is the same, on another stream. Only ``wait_for_room`` makes the host wait. Pages
    that leave DRAM or disk are checked on the way here. VRAM itself is trusted: a check would cost a pass over it, and cards for such work
    correct memory errors.
    """

    def __init__(self, device: CopyDevice, bounce: torch.Tensor, slots: SlotBytes):
        self._device, self._bounce, self._slots = device, bounce, slots
        self._inward, self._outward = device.lane(), device.lane()
        self._free_after: list[Event | None] = [None] * len(bounce)
        """When each page of ``bounce`` may be overwritten."""
        self._next = 0

    def bring(self, slot: int, source: torch.Tensor) -> Event:
        """Queue a record's way from page-locked ``source`` to ``slot``. After the returned event ``source`` may change."""
        place = self._take()
        if self._free_after[place] is not None:
            self._inward.waits(self._free_after[place])
        self._inward.copy((self._bounce[place, at : at + n], source[start : start + n]) for at, start, n in self._slots.card_ranges)
        arrived = self._inward.event()
        self._device.compute_waits(arrived)
        self._device.launch(partial(self._slots.fill, slot, self._bounce[place]))
        self._free_after[place] = self._device.compute_event()
        return arrived

    def room(self) -> int:
        """Records that ``send`` takes now without waiting for anything: half of ``bounce`` at most, so that one half is filled while the
        other is emptied."""
        places = range(self._next, min(self._next + max(1, len(self._bounce) // 2), len(self._bounce)))
        busy = (i for i, place in enumerate(places) if not self._is_free(place))
        return next(busy, len(places))

    def wait_for_room(self) -> None:
        """Return when ``send`` takes a record without waiting."""
        if self._free_after[self._next] is not None:
            self._device.host_waits(self._free_after[self._next])

    def send(self, slots: Sequence[int], targets: Sequence[torch.Tensor]) -> Event:
        """Queue the way of computed pages from ``slots`` to page-locked ``targets``, where they are after the event; a slot may be given
        away at once. Beyond ``room()`` what is computed next waits for the copies before."""
        places = [self._take() for _ in slots]
        for slot, place in zip(slots, places, strict=True):
            if not self._is_free(place):
                self._device.compute_waits(self._free_after[place])
            self._device.launch(partial(self._slots.pack, slot, self._bounce[place]))
        self._outward.waits(self._device.compute_event())
        moved = zip(places, targets, strict=True)
        self._outward.copy(
            (target[start : start + n], self._bounce[place, at : at + n])
            for place, target in moved
            for at, start, n in self._slots.card_ranges
        )
        over = self._outward.event()
        for place in places:
            self._free_after[place] = over
        return over

    def _take(self) -> int:
        place = self._next
        self._next = (place + 1) % len(self._bounce)
        return place

    def _is_free(self, place: int) -> bool:
        return self._free_after[place] is None or self._device.done(self._free_after[place])
