"""Pages in transit from their tiers to slots of the pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.disk.disk_pages import Warn
from penstock.runtime.kv.pages.page_ahead import ReadAhead
from penstock.runtime.kv.pages.page_tiers import Tiers
from penstock.runtime.kv.pages.prompt_pages import Page, in_order
from penstock.runtime.kv.pages.reuse_facts import Totals
from penstock.runtime.memory.device import Event

_PARTS = 8
"""Into so many parts the pages of a batch are dealt for their checks. Each part takes the interpreter's lock from the thread that launches
kernels, and eight threads read faster than the link that the pages come over."""


class Brought(NamedTuple):
    slots: dict[bytes, int]
    """Where each page lies in the pool; the first page of a sequence that is missing here, and all behind it, could not be had."""
    tiers: dict[bytes, Tier]
    """Where each came from."""


@dataclass(eq=False, slots=True)
class _Copied:
    """A slot of DRAM that is held while it is copied from and checked."""

    slot: int
    over: Event | None
    unchecked: bool
    """Its check has not begun."""
    check: Future[set[bytes]] | None = None


class Restore:
    """Brings pages. Pages in the pool are there. Pages in DRAM are copied at the link's rate while other threads compare their checksums.
    Pages on disk are read and checked by ``readers``, several ahead, so that disk and link overlap. A card may compute with pages of
    DRAM before their checks are over: ``confirm`` waits for these. There all copies are queued before the first check begins: threads that
    come and go for the interpreter's lock made a page take the host 0.1 ms instead of 0.07, on a crowded
    host 0.3 ms. That is what the link takes for 16.8 MB."""

    def __init__(self, tiers: Tiers, readers: ThreadPoolExecutor, depth: int, checks: ThreadPoolExecutor, totals: Totals, warn: Warn):
        self._tiers, self._dram = tiers, tiers.dram.slots
        self._readers, self._depth, self._checks = readers, depth, checks
        self._totals, self._warn = totals, warn
        self._copied: deque[_Copied] = deque()
        self._unchecked: list[tuple[bytes, _Copied]] = []
        self._unsure: list[Future[set[bytes]]] = []
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
        self.release()
        taken: dict[bytes, int] = {}
        ahead = ReadAhead(on_disk, self._tiers.disk, self._tiers.dram, self._readers, self._depth)
        try:
            taken |= {} if slot_of is not None else self._take(wanted, far)
            for key, parent in far:
                tier, slot = Tier.dram, None if parent in missing else self._dram.hold(key)
                if slot is None and parent not in missing:
                    self.release()
                    tier, slot = Tier.ssd, ahead.take(key, self._free_one)
                if slot is None:
                    missing.add(key)
                    continue
                moved[key] = tier
                self._pages[key] = Page(key, parent, taken.pop(key) if slot_of is None else slot_of(key))
                self._move(self._pages[key], slot, tier is Tier.dram)
        finally:
            ahead.close()
            self._begin_checks()
            pool.release(taken.values())
        return Brought({key: page.slot for key, page in self._pages.items()}, moved)

    def confirm(self, elsewhere: Set[bytes] = frozenset()) -> set[bytes]:
        """Wait until all that was brought is checked -> the pages that are no good, here or ``elsewhere``: they and what follows them are
        to be computed. Those are dropped, the others are kept. A second call finds nothing left to check."""
        bad = set[bytes]().union(*(check.result() for check in self._unsure))
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

    def _take(self, wanted: Sequence[Sequence[bytes]], far: Sequence[tuple[bytes, bytes]]) -> dict[bytes, int]:
        """Slots of the pool for pages that come, those of a sequence one behind the other where there is room: taken at once."""
        coming = {key for key, _ in far}
        keys = [key for key in dict.fromkeys(key for own in wanted for key in own) if key in coming]
        before = next((self._pages[parent].slot for _, parent in far if parent in self._pages), None)
        return dict(zip(keys, self._tiers.pool.take(len(keys), before), strict=True)) if keys else {}

    def _move(self, page: Page, slot: int, is_to_check: bool) -> None:
        """Write the record in a slot of DRAM to ``page``'s in the pool; on a card that is queued. Where this thread copies itself, others
        check meanwhile."""
        record, slots, card = self._tiers.dram.tensor(slot), self._tiers.slots, self._tiers.card
        copied = _Copied(slot, None, is_to_check)
        if is_to_check:
            self._unchecked.append((page.key, copied))
        if slots.any_on_host:
            self._begin_checks()
            slots.fill_host(page.slot, record)
        copied.over = card.bring(page.slot, record) if card is not None else None
        self._copied.append(copied)

    def _begin_checks(self) -> None:
        """Of all pages whose check has not begun."""
        unchecked, self._unchecked = self._unchecked, []
        for first in range(min(_PARTS, len(unchecked))):
            part = unchecked[first::_PARTS]
            check = self._checks.submit(self._bad, part)
            self._unsure.append(check)
            for _, copied in part:
                copied.unchecked, copied.check = False, check

    def _bad(self, part: Sequence[tuple[bytes, _Copied]]) -> set[bytes]:
        """Pages of ``part`` whose checksums are wrong."""
        return {key for key, copied in part if not self._tiers.dram.is_sound(copied.slot)}

    def _refuse(self, key: bytes) -> None:
        if not self._totals.failed_checks:
            line = "a page of KV in DRAM was not used, its checksum is wrong; it will be computed again"
            self._warn(f"{line} (reported once, counted in the report)")
        self._totals.failed_checks += 1
        self._dram.drop(key)

    def _free_one(self) -> bool:
        if not self._copied:
            return False
        self._begin_checks()
        copied = self._copied.popleft()
        if copied.over is not None and self._tiers.device is not None:
            self._tiers.device.host_waits(copied.over)
        if copied.check is not None:
            copied.check.result()
        self._dram.release(copied.slot)
        return True

    def _is_over(self, copied: _Copied) -> bool:
        if copied.unchecked or not (copied.check is None or copied.check.done()):
            return False
        device = self._tiers.device
        return copied.over is None or device is None or device.done(copied.over)
