"""Computed pages in transit from the pool to DRAM, and on to the disk, behind the computing thread's back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from penstock.runtime.kv.disk.page_record import checksum_of
from penstock.runtime.kv.pages.page_tiers import Tiers
from penstock.runtime.kv.pages.prompt_pages import OtherRanks, Page
from penstock.runtime.kv.pages.reuse_facts import Totals
from penstock.runtime.memory.device import Event

_QUEUED = 8
"""Without a card, pages that wait for a thread to copy them or are being copied."""
_LOOK_S = 0.1
"""Seconds between two looks at an interrupt while the disk is waited for."""
_PACE_S = 0.1
"""Least seconds between two groups of pages that a card's batch copies out while it computes. A page written back in each step lengthened
steps of 16 ms by 1.3 to 2.4 ms (8B geometry, H200). The cause is this thread and, it seems, the interpreter's lock that checking and
writing threads take. The value is an estimate from that; others were not tried. What a short answer leaves is copied out after its last
token."""


class _Arriving(NamedTuple):
    """Pages in transit to DRAM; ``held`` are slots of the pool that must stay as they are until then."""

    future: Future[None]
    held: Sequence[int]


class Capture:
    """What is still to be copied out of the pool, each page with a reference to its slot, and what is in transit.

    ``threads`` wait for the card, copy what lies in DRAM, and make checksums; the disk has a thread of its own. A page's slot in DRAM stays
    as it is until the disk has it; ``leave`` of the slots, half of them at most, are free of that, so that pages can be read meanwhile.
    ``settle`` returns, on one of ``threads``, once the KV that lies in DRAM is as computed. ``others`` copy out what this does.
    """

    def __init__(
        self,
        tiers: Tiers,
        leave: int,
        threads: ThreadPoolExecutor,
        totals: Totals,
        settle: Callable[[], None],
        others: OtherRanks | None = None,
    ):
        self._others = others
        self._tiers, self._slots, self._threads, self._totals, self._settle = tiers, tiers.dram.slots, threads, totals, settle
        self._leave = min(leave, self._slots.count // 2)
        self._writing = 0
        """Pages that the disk has and whose slots it needs."""
        self._given_back = 0
        """Such slots so far."""
        self._slot_back = threading.Condition()
        self._todo: dict[bytes, Page] = {}
        self._arriving: deque[_Arriving] = deque()
        self._due_s = 0.0

    @property
    def pending(self) -> int:
        """Pages whose copies are not yet queued."""
        return len(self._todo)

    def add(self, page: Page) -> None:
        """Copy this out, too; the first are the first to go."""
        if page.key not in self._todo:
            self._tiers.pool.keep([page.slot])
            self._todo[page.key] = page

    def advance(self) -> None:
        """Queue as many pages as need no waiting. With a card: one group, if the last one is long enough ago. Without: as many as the
        threads are ready for."""
        if self._tiers.card is not None:
            now = time.monotonic()
            if now < self._due_s:
                return
            self._due_s = now + _PACE_S
        self._send()

    def finish(self) -> None:
        """Copy out all that is left, and wait until it lies in DRAM. Does not wait for the disk: what finds no slot is left."""
        self.send()
        self._wait()

    def send(self) -> None:
        """Queue all that finds a slot; waits for room to queue it in, and for DRAM where the pool lies there."""
        card = self._tiers.card
        while self._todo:
            before = len(self._todo)
            self._send()
            if len(self._todo) < before:
                continue
            if self._arriving:
                self._await_one()
            elif card is not None and not card.room():
                card.wait_for_room()
            else:
                break
        if self._tiers.slots.any_on_host:
            self._wait()

    def drain(self, until_s: float, progress: Callable[[int, int], None]) -> None:
        """``finish``, and what finds no slot waits for the disk to give one back, until ``until_s`` of ``time.monotonic``. No slot is left
        for pages to be read. ``progress`` gets pages, every 0.1 s at least, and may raise."""
        card, total = self._tiers.card, len(self._todo)
        while self._todo and (left_s := until_s - time.monotonic()) > 0:
            before, given_back = len(self._todo), self._given_back
            self._send(leave=0, wait_s=left_s)
            progress(total - len(self._todo), total)
            if len(self._todo) < before:
                continue
            if self._arriving:
                self._await_one()
            elif card is not None and not card.room():
                card.wait_for_room()
            elif not self._await_slot(given_back, min(left_s, _LOOK_S)):
                break
        self._wait()

    def give_up(self, count: int | None = None) -> int:
        """The last ``count`` pages that are not in transit are lost, all without one -> how many. What comes first is of use to more
        prompts. Waits for what is in transit; where all are given up no slot of the pool is held afterwards."""
        pages = list(self._todo.values())[max(0, len(self._todo) - count) if count is not None else 0 :]
        self._tiers.pool.let_go(page.slot for page in pages)
        for page in pages:
            del self._todo[page.key]
        self._wait()
        return len(pages)

    def rescue(self, page: Page) -> None:
        """Copy a page that is pushed out of the pool to DRAM, unless it is there or on disk."""
        if page.key in self._slots or self._tiers.is_on_disk(page.key):
            return
        taken = self._slots.take(page.key, self._leave)
        if taken is not None:
            self._totals.demoted += 1
            self._tiers.pool.keep([page.slot])
            self._depart([page], [taken.slot])
            if self._tiers.slots.any_on_host:
                self._wait()

    def _send(self, leave: int | None = None, wait_s: float = 0.0) -> None:
        while self._arriving and self._arriving[0].future.done():
            self._await_one()
        card = self._tiers.card
        room = _QUEUED - len(self._arriving) if card is None else card.room()
        pages, slots = self._next(room, self._leave if leave is None else leave)
        self._totals.captured += len(pages)
        if card is None:
            for page, slot in zip(pages, slots, strict=True):
                self._depart([page], [slot], wait_s)
        elif pages:
            self._depart(pages, slots, wait_s)

    def _next(self, count: int, leave: int) -> tuple[list[Page], list[int]]:
        pages: list[Page] = []
        slots: list[int] = []
        while self._todo and len(pages) < count:
            page = next(iter(self._todo.values()))
            if page.key in self._slots:
                self._tiers.pool.let_go([page.slot])
            else:
                taken = self._slots.take(page.key, leave)
                if taken is None:
                    break
                pages.append(page)
                slots.append(taken.slot)
            del self._todo[page.key]
        return pages, slots

    def _depart(self, pages: Sequence[Page], slots: Sequence[int], wait_s: float = 0.0) -> None:
        """Queue the way of ``pages`` to ``slots`` of DRAM, and give their references back as soon as their slots may be written to."""
        if self._others is not None:
            self._others.put_by(pages, wait_s)
        over, held = None, [page.slot for page in pages]
        if self._tiers.card is not None:
            over = self._tiers.card.send(held, [self._tiers.dram.tensor(slot) for slot in slots])
        if not self._tiers.slots.any_on_host:
            self._tiers.pool.let_go(held)
            held = []
        self._arriving.append(_Arriving(self._threads.submit(self._arrive, pages, slots, over), held))

    def _arrive(self, pages: Sequence[Page], slots: Sequence[int], over: Event | None) -> None:
        if over is not None and self._tiers.device is not None:
            self._tiers.device.host_waits(over)
        if self._tiers.slots.any_on_host:
            self._settle()
        dram, disk = self._tiers.dram, self._tiers.disk
        for page, slot in zip(pages, slots, strict=True):
            self._tiers.slots.pack_host(page.slot, dram.tensor(slot))
            checksum = checksum_of(dram.view(slot))
            dram.seal(slot, checksum)
            self._slots.publish(page.key, hold=disk is not None)
            if disk is not None:
                with self._slot_back:
                    self._writing += 1
                if not disk.put(page.key, page.parent, dram.view(slot), checksum, partial(self._written, slot)):
                    self._written(slot, False)

    def _written(self, slot: int, _stored: bool) -> None:
        self._slots.release(slot)
        with self._slot_back:
            self._writing -= 1
            self._given_back += 1
            self._slot_back.notify_all()

    def _await_slot(self, given_back: int, seconds: float) -> bool:
        """Wait until the disk gave more slots back than so many -> whether it did, or still may."""
        with self._slot_back:
            self._slot_back.wait_for(lambda: self._given_back > given_back or not self._writing, seconds)
            return self._given_back > given_back or self._writing > 0

    def _wait(self) -> None:
        while self._arriving:
            self._await_one()

    def _await_one(self) -> None:
        future, held = self._arriving.popleft()
        try:
            future.result()
        finally:
            self._tiers.pool.let_go(held)
