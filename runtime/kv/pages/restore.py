"""Pages on their way from their tiers to the rows of a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.disk.disk_pages import Warn
from penstock.runtime.kv.pages.page_ahead import ReadAhead
from penstock.runtime.kv.pages.page_tiers import Tiers
from penstock.runtime.kv.pages.prompt_pages import Page
from penstock.runtime.kv.pages.reuse_facts import Totals
from penstock.runtime.kv.pages.strips import Strips, scatter
from penstock.runtime.memory.device import Event


class Brought(NamedTuple):
    start: int
    """Where computing begins: earlier than planned where a page was not to be had."""
    tiers: dict[bytes, Tier]
    """Where each page came from."""


class _Copied(NamedTuple):
    """A slot of DRAM that is held while it is copied from and checked."""

    slot: int
    over: Event | None
    check: Future[bool] | None


class Restore:
    """Brings pages: those in VRAM are written to their rows at once, those in DRAM copied as fast as the link takes them while other
    threads compare their checksums, those on disk read and checked by ``readers``, several ahead, so that disk and link work side by
    side. A card may compute with pages of DRAM before their checks are over: ``confirm`` waits for these."""

    def __init__(self, tiers: Tiers, readers: ThreadPoolExecutor, depth: int, checks: ThreadPoolExecutor, totals: Totals, warn: Warn):
        self._tiers, self._slots = tiers, tiers.dram.slots
        self._readers, self._depth, self._checks = readers, depth, checks
        self._totals, self._warn = totals, warn
        self._copied: deque[_Copied] = deque()
        self._unsure: list[tuple[Page, Future[bool]]] = []
        self._wanted: Sequence[Page] = ()

    def bring(self, wanted: Sequence[Page], where: dict[bytes, Tier], start: int, strips: Strips) -> Brought:
        """Bring ``wanted``, all pages that begin before the row ``start``, which lay ``where`` a moment ago; then ``confirm``. On a card
        copies may still be under way, ordered before what is launched next."""
        card = self._tiers.card
        moved = {page.key: Tier.vram for page in wanted if where[page.key] is Tier.vram}
        if moved:
            card.show([page for page in wanted if page.key in moved], strips)
        far = [page for page in wanted if page.key not in moved]
        self._wanted = wanted
        on_disk = (page.key for page in far if where[page.key] is Tier.ssd)
        ahead = ReadAhead(on_disk, self._tiers.disk, self._tiers.dram, self._readers, self._depth)
        try:
            for page in far:
                self.release()
                check, tier, slot = None, Tier.dram, self._slots.hold(page.key)
                if slot is not None:
                    check = self._checks.submit(self._tiers.dram.is_sound, slot)
                    self._unsure.append((page, check))
                else:
                    tier, slot = Tier.ssd, ahead.take(page.key, self._free_one)
                if slot is None:
                    start = min(start, page.first_row)
                    break
                moved[page.key] = tier
                self._copied.append(_Copied(slot, self._place(page, slot, strips), check))
        finally:
            ahead.close()
        if card is not None:
            card.flush(strips)
        return Brought(start, moved)

    def confirm(self, start: int) -> int:
        """Wait until all that was brought is checked -> ``start``, or the first row of a page that is no good: it and what follows is to be
        computed. Such pages are dropped; none was given to VRAM yet. A second call finds nothing left to check."""
        bad = [page for page, check in self._unsure if not check.result()]
        self._unsure.clear()
        for page in bad:
            self._refuse(page.key)
        if self._tiers.card is not None:
            self._tiers.card.confirm({page.key for page in bad})
        self.release()
        for page in reversed(self._wanted):  # what a prefix begins with is of use to more prompts than what it ends with
            self._tiers.nearest(page.key)
        self._wanted = ()
        return min((start, *(page.first_row for page in bad)))

    def release(self, wait: bool = False) -> None:
        """Give back the slots whose copies are over; with ``wait`` all."""
        while self._copied and (wait or self._is_over(self._copied[0])):
            self._free_one()

    def _place(self, page: Page, slot: int, strips: Strips) -> Event | None:
        """Write a page to its rows; on a card that is queued, and the slot is in use until the returned event."""
        source = self._tiers.dram.tensor(slot)
        if strips.on_host:
            for row in page.rows:
                scatter(strips.on_host, source[None], *row)
        return self._tiers.card.bring(page, source, strips) if self._tiers.card is not None else None

    def _refuse(self, key: bytes) -> None:
        if not self._totals.failed_checks:
            line = "a page of KV in DRAM was not used, its checksum is wrong; it will be computed again"
            self._warn(f"{line} (told once, counted in the report)")
        self._totals.failed_checks += 1
        self._slots.drop(key)

    def _free_one(self) -> bool:
        if not self._copied:
            return False
        slot, over, check = self._copied.popleft()
        if over is not None:
            self._tiers.device.host_waits(over)
        if check is not None:
            check.result()
        self._slots.release(slot)
        return True

    def _is_over(self, copied: _Copied) -> bool:
        return (copied.over is None or self._tiers.device.done(copied.over)) and (copied.check is None or copied.check.done())
