"""Pages between page-locked DRAM and KV buffers in VRAM, and those that stay in VRAM, the L1 tier of the KV prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from penstock.runtime.kv.pages.page_slots import Slots
from penstock.runtime.kv.pages.prompt_pages import Page, side_by_side
from penstock.runtime.kv.pages.strips import Strips, gather, scatter
from penstock.runtime.memory.device import CopyDevice, Event


class CardPages:
    """``bounce`` and ``kept`` are VRAM for whole pages, uint8 [pages, bytes]; ``kept`` may be empty.

    A page comes as one copy into ``bounce``, on a stream of its own; a group of pages goes from there to its rows in few kernels on the
    compute stream, ordered before what computes with them, while the next group is copied. The way back is the same, on another stream.
    Nothing here makes the host wait. A page is kept in VRAM where all its layers' KV lies there. What left DRAM or disk was checked on the
    way here; VRAM itself is trusted: a check would cost a pass over it, and cards for such work have memory that corrects errors.

    """

    def __init__(self, device: CopyDevice, bounce: torch.Tensor, kept: torch.Tensor, page_tokens: int):
        self.slots = Slots(len(kept))
        self.on_evicted: Callable[[bytes, torch.Tensor], None] = lambda key, held: None
        """Told the key of a page that is pushed out of VRAM, and its bytes, which what is launched next overwrites."""
        self._device, self._bounce, self._kept, self._tokens = device, bounce, kept, page_tokens
        self._inward, self._outward = device.lane(), device.lane()
        self._free_after: list[Event | None] = [None] * len(bounce)
        """When each page of ``bounce`` may be overwritten."""
        self._next = 0
        self._most = max(1, len(bounce) // 2)
        """Pages of a group: half, so that one half is filled while the other is emptied."""
        self._group: list[tuple[Page, int]] = []
        self._arrived: Event | None = None
        self._unsure: set[bytes] = set()

    def show(self, pages: Sequence[Page], strips: Strips) -> None:
        """Write pages that are kept to their rows."""
        self._scatter(sorted(((page, self.slots.find(page.key)) for page in pages), key=lambda placed: placed[1]), self._kept, strips)

    def bring(self, page: Page, source: torch.Tensor, strips: Strips) -> Event:
        """Queue a page's way from page-locked ``source`` to its rows; it goes on there with its group, at the latest with ``flush``. After
        the returned event ``source`` may change."""
        place = self._next
        self._next = (place + 1) % len(self._bounce)
        if self._free_after[place] is not None:
            self._inward.waits(self._free_after[place])
        self._inward.copy((self._bounce[place, a:b], source[a:b]) for a, b in strips.card_ranges)
        self._arrived = self._inward.event()
        self._group.append((page, place))
        if len(self._group) == self._most or not self._next:
            self.flush(strips)
        return self._arrived

    def flush(self, strips: Strips) -> None:
        """Issue what writes the last pages to their rows."""
        if not self._group:
            return
        self._device.compute_waits(self._arrived)
        self._scatter(self._group, self._bounce, strips)
        if not strips.on_host:
            self._unsure.update(page.key for page, place in self._group if self._keep(page.key, place))
        self._emptied([place for _, place in self._group], self._device.compute_event())
        self._group = []

    def confirm(self, bad: Collection[bytes]) -> None:
        """All pages that came were checked meanwhile: keep those that are not ``bad``."""
        for key in self._unsure:
            (self.slots.abandon if key in bad else self.slots.publish)(key)
        self._unsure.clear()

    def room(self) -> int:
        """Pages that ``send`` takes now without waiting for anything."""
        places = range(self._next, min(self._next + self._most, len(self._bounce)))
        busy = (i for i, place in enumerate(places) if not self._is_free(place))
        return next(busy, len(places))

    def wait_for_room(self) -> None:
        """Return when ``send`` takes a page."""
        if self._free_after[self._next] is not None:
            self._device.host_waits(self._free_after[self._next])

    def send(self, pages: Sequence[Page], targets: Sequence[torch.Tensor], strips: Strips) -> Event:
        """Queue the way of at most ``room()`` computed pages from their rows to page-locked ``targets``. They are there after the event."""
        places = range(self._next, self._next + len(pages))
        self._next = places.stop % len(self._bounce)
        for page, place, count in side_by_side(list(zip(pages, places, strict=True)), self._tokens):
            self._device.launch(partial(gather, strips.on_card, self._bounce[place : place + count], *page.rows[0]))
        if not strips.on_host:
            for page, place in zip(pages, places, strict=True):
                if self._keep(page.key, place):
                    self.slots.publish(page.key)
        self._outward.waits(self._device.compute_event())
        moved = zip(places, targets, strict=True)
        self._outward.copy((target[a:b], self._bounce[place, a:b]) for place, target in moved for a, b in strips.card_ranges)
        over = self._outward.event()
        self._emptied(places, over)
        return over

    def rescue(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Queue a copy of a page that is about to be overwritten in VRAM; what is launched from now on waits for it."""
        self._outward.waits(self._device.compute_event())
        self._outward.copy([(target, source)])
        over = self._outward.event()
        self._device.compute_waits(over)
        return over

    def _keep(self, key: bytes, place: int) -> bool:
        taken = self.slots.take(key)
        if taken is None:
            return False
        slot = self._kept[taken.slot]
        if taken.evicted is not None:
            self.on_evicted(taken.evicted, slot)
        self._device.launch(partial(slot.copy_, self._bounce[place]))
        return True

    def _scatter(self, placed: Sequence[tuple[Page, int]], source: torch.Tensor, strips: Strips) -> None:
        for first, place, count in side_by_side(placed, self._tokens):
            for row in first.rows:
                self._device.launch(partial(scatter, strips.on_card, source[place : place + count], *row))

    def _is_free(self, place: int) -> bool:
        return self._free_after[place] is None or self._device.done(self._free_after[place])

    def _emptied(self, places: Sequence[int], after: Event) -> None:
        for place in places:
            self._free_after[place] = after
