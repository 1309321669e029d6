"""Pages in transit from their tiers to slots of the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.disk.disk_pages import Warn
from penstock.runtime.kv.pages.page_ahead import ReadAhead
from penstock.runtime.kv.pages.page_tiers import Tiers
from penstock.runtime.kv.pages.prompt_pages import Page, in_order
from penstock.runtime.kv.pages.reuse_facts import Totals
from penstock.runtime.memory.device import Event


class Brought(NamedTuple):
    slots: dict[bytes, int]
    """Where each page lies in the pool; the first page of a sequence that is missing here, and all behind it, could not be had."""
    tiers: dict[bytes, Tier]
    """Where each came from."""


class _Copied(NamedTuple):
    """A slot of DRAM that is held while it is copied from and checked."""

    slot: int
    over: Event | None
    check: Future[bool] | None


class Restore:
    """Brings pages. Pages in the pool are there. Pages in DRAM are copied at the link's rate while other threads compare their checksums.
    Pages on disk are read and checked by ``readers``, several ahead, so that disk and link overlap. A card may compute with pages of
    DRAM before their checks are over: ``confirm`` waits for these."""

    def __init__(self, tiers: Tiers, readers: ThreadPoolExecutor, depth: int, checks: ThreadPoolExecutor, totals: Totals, warn: Warn):
        self._tiers, self._dram = tiers, tiers.dram.slots
        self._readers, self._depth, self._checks = readers, depth, checks
        self._totals, self._warn = totals, warn
        self._copied: deque[_Copied] = deque()
        self._unsure: list[tuple[bytes, Future[bool]]] = []
        self._pages: dict[bytes, Page] = {}

    def bring(
        self, wanted: Sequence[Sequence[bytes]], where: Mapping[bytes, Tier], slot_of: Callable[[bytes], int] | None = None
    ) -> Brought:
        """Bring the first pages of each sequence, which lay ``where`` a moment ago; a page of several is brought once. Each slot has a
        reference until ``confirm``: it is a free one, or that of ``slot_of``. On a card copies may still be in flight, ordered before what
        is launched next."""
        pages, pool, kept = list(in_order(wanted)), self._tiers.pool, self._tiers.kept
        moved: dict[bytes, Tier] = {}
        for key, parent in pages:  # before any slot is taken, since that may push pages out
            there = None if kept is None or where[key] is not Tier.vram else kept.find(key)
            if key in self._pages:  # brought a moment ago
                moved[key] = Tier.vram
            elif there is not None:
                moved[key] = Tier.vram
                self._pages[key] = Page(key, parent, there)
                pool.share([there])
        far = [(key, parent) for key, parent in pages if key not in moved]
        missing: set[bytes] = set()
        on_disk = (key for key, _ in far if where[key] is Tier.ssd)
        ahead = ReadAhead(on_disk, self._tiers.disk, self._tiers.dram, self._readers, self._depth)
        try:
            for key, parent in far:
                self.release()
                check, tier, slot = None, Tier.dram, None if parent in missing else self._dram.hold(key)
                if slot is not None:
                    check = self._checks.submit(self._tiers.dram.is_sound, slot)
                    self._unsure.append((key, check))
                elif parent not in missing:
                    tier, slot = Tier.ssd, ahead.take(key, self._free_one)
                if slot is None:
                    missing.add(key)
                    continue
                moved[key] = tier
                self._pages[key] = Page(key, parent, pool.take(1)[0] if slot_of is None else slot_of(key))
                self._copied.append(_Copied(slot, self._place(self._pages[key].slot, slot), check))
        finally:
            ahead.close()
        return Brought({key: page.slot for key, page in self._pages.items()}, moved)

    def confirm(self, elsewhere: Set[bytes] = frozenset()) -> set[bytes]:
        """Wait until all that was brought is checked -> the pages that are no good, here or ``elsewhere``: they and what follows them are
        to be computed. Those are dropped, the others are kept. A second call finds nothing left to check."""
        bad = {key for key, check in self._unsure if not check.result()}
        self._unsure.clear()
        for key in bad:
            self._refuse(key)
        for key in elsewhere:
            self._dram.drop(key)
        bad |= elsewhere
        self.release()
        pages, self._pages = self._pages, {}
        for page in reversed(pages.values()):  # what a prefix begins with is of use to more prompts than what it ends with
            if self._tiers.kept is not None and page.key not in bad:
                self._tiers.kept.add(page)
            self._tiers.nearest(page.key)
        self._tiers.pool.release(page.slot for page in pages.values())
        return bad

    def release(self, wait: bool = False) -> None:
        """Give back the slots of DRAM whose copies are over; with ``wait`` all."""
        while self._copied and (wait or self._is_over(self._copied[0])):
            self._free_one()

    def _place(self, slot: int, dram: int) -> Event | None:
        """Write a record to its slot in the pool; on a card that is queued, and the slot of DRAM is in use until the returned event."""
        record = self._tiers.dram.tensor(dram)
        self._tiers.slots.fill_host(slot, record)
        return self._tiers.card.bring(slot, record) if self._tiers.card is not None else None

    def _refuse(self, key: bytes) -> None:
        if not self._totals.failed_checks:
            line = "a page of KV in DRAM was not used, its checksum is wrong; it will be computed again"
            self._warn(f"{line} (reported once, counted in the report)")
        self._totals.failed_checks += 1
        self._dram.drop(key)

    def _free_one(self) -> bool:
        if not self._copied:
            return False
        slot, over, check = self._copied.popleft()
        if over is not None and self._tiers.device is not None:
            self._tiers.device.host_waits(over)
        if check is not None:
            check.result()
        self._dram.release(slot)
        return True

    def _is_over(self, copied: _Copied) -> bool:
        device = self._tiers.device
        return (copied.over is None or device is None or device.done(copied.over)) and (copied.check is None or copied.check.done())
