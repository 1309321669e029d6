"""Computed pages on their way from the KV buffers of a batch to DRAM, and on to the disk, behind the computing thread's back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from penstock.runtime.kv.disk.page_record import checksum_of
from penstock.runtime.kv.pages.page_tiers import Tiers
from penstock.runtime.kv.pages.prompt_pages import Page
from penstock.runtime.kv.pages.reuse_facts import Totals
from penstock.runtime.kv.pages.strips import Strips, gather_aside
from penstock.runtime.memory.device import Event

_QUEUED = 8
"""Without a card, pages that wait for a thread to copy them or are being copied."""
_PACE_S = 0.1
"""With a card, the least time from group to group while it computes. A page written back in each step lengthened steps of 16 ms by 1.3 to
2.4 ms (8B geometry, H200), some of it in this thread and some through the threads that check and write, by the interpreter's lock as it
seems. Estimated from that, not tried at other values; what a short answer leaves is copied out after its last token."""


class Capture:
    """What is still to be copied out of a batch, and what is on its way.

    ``threads`` wait for the card, copy what lies in DRAM, and make checksums; the disk has a thread of its own. A page's slot in DRAM stays
    as it is until the disk has it; ``leave`` of the slots, half of them at most, are free of that, so that pages can be read meanwhile.
    ``settle`` returns, on one of ``threads``, once the KV that lies in DRAM is as computed.
    """

    def __init__(self, tiers: Tiers, leave: int, threads: ThreadPoolExecutor, totals: Totals, settle: Callable[[], None]):
        self._tiers, self._slots, self._threads, self._totals, self._settle = tiers, tiers.dram.slots, threads, totals, settle
        self._leave = min(leave, self._slots.count // 2)
        self._todo: dict[bytes, Page] = {}
        self._arriving: deque[Future] = deque()
        self._due_s = 0.0
        if tiers.card is not None:
            tiers.card.on_evicted = self._rescue

    @property
    def pending(self) -> int:
        """Pages that are not yet on their way."""
        return len(self._todo)

    def add(self, pages: Iterable[Page]) -> None:
        """Copy these out, too; the first are the first to go."""
        for page in pages:
            self._todo.setdefault(page.key, page)

    def advance(self, strips: Strips) -> None:
        """Queue as many pages as can go now without waiting: with a card one group, if the last one is long enough ago, without one what
        the threads are ready for."""
        if self._tiers.card is not None:
            now = time.monotonic()
            if now < self._due_s:
                return
            self._due_s = now + _PACE_S
        self._send(strips)

    def finish(self, strips: Strips) -> None:
        """Copy out all that is left, and wait until it lies in DRAM. Does not wait for the disk: what finds no slot is left."""
        card = self._tiers.card
        while self._todo:
            before = len(self._todo)
            self._send(strips)
            if len(self._todo) < before:
                continue
            if self._arriving:
                self._arriving.popleft().result()
            elif card is not None and not card.room():
                card.wait_for_room()
            else:
                break
        self._wait()

    def give_up(self) -> None:
        """The buffers are about to be overwritten: what is not on its way is lost. Waits for what is."""
        self._totals.skipped += len(self._todo)
        self._todo.clear()
        self._wait()

    def _rescue(self, key: bytes, source: torch.Tensor) -> None:
        """Copy a page that is pushed out of VRAM to DRAM, unless it is there or on disk."""
        if key in self._slots or self._tiers.is_on_disk(key):
            return
        taken = self._slots.take(key, self._leave)
        if taken is not None:
            self._totals.demoted += 1
            self._begin(self._land, key, taken.slot, self._tiers.card.rescue(source, self._tiers.dram.tensor(taken.slot)))

    def _send(self, strips: Strips) -> None:
        self._reap()
        card = self._tiers.card
        pages, slots = self._next(_QUEUED - len(self._arriving) if card is None else card.room())
        if not pages:
            return
        self._totals.captured += len(pages)
        if card is None:
            for page, slot in zip(pages, slots, strict=True):
                self._begin(self._arrive, [page], [slot], strips, None)
        else:
            over = card.send(pages, [self._tiers.dram.tensor(slot) for slot in slots], strips)
            self._begin(self._arrive, pages, slots, strips, over)

    def _next(self, count: int) -> tuple[list[Page], list[int]]:
        pages: list[Page] = []
        slots: list[int] = []
        while self._todo and len(pages) < count:
            page = next(iter(self._todo.values()))
            if page.key not in self._slots:
                taken = self._slots.take(page.key, self._leave)
                if taken is None:
                    break
                pages.append(page)
                slots.append(taken.slot)
            del self._todo[page.key]
        return pages, slots

    def _begin(self, task: Callable[..., None], *arguments: object) -> None:
        self._arriving.append(self._threads.submit(task, *arguments))

    def _arrive(self, pages: Sequence[Page], slots: Sequence[int], strips: Strips, over: Event | None) -> None:
        if over is not None:
            self._tiers.device.host_waits(over)
        if strips.on_host:
            self._settle()
        dram, disk = self._tiers.dram, self._tiers.disk
        for page, slot in zip(pages, slots, strict=True):
            gather_aside(strips.on_host, dram.tensor(slot)[None], *page.rows[0])
            checksum = checksum_of(dram.view(slot))
            dram.seal(slot, checksum)
            self._slots.publish(page.key, hold=disk is not None)
            written = partial(self._written, slot)
            if disk is not None and not disk.put(page.key, page.parent, dram.view(slot), checksum, written):
                self._slots.release(slot)

    def _written(self, slot: int, _stored: bool) -> None:
        self._slots.release(slot)

    def _land(self, key: bytes, slot: int, over: Event) -> None:
        self._tiers.device.host_waits(over)
        self._tiers.dram.seal(slot, checksum_of(self._tiers.dram.view(slot)))
        self._slots.publish(key)

    def _reap(self) -> None:
        while self._arriving and self._arriving[0].done():
            self._arriving.popleft().result()

    def _wait(self) -> None:
        while self._arriving:
            self._arriving.popleft().result()
