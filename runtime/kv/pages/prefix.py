"""Prompts that begin alike are computed once: their KV pages are kept in VRAM, DRAM and on disk, and restored from the nearest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from penstock.planner.common.host_memory import usable_cores
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.kv.batch.contiguous import Pair
from penstock.runtime.kv.disk.disk_pages import DiskPages, Warn, to_stderr
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.pages.capture import Capture
from penstock.runtime.kv.pages.find import Found, choose, look_up
from penstock.runtime.kv.pages.page_tiers import PageMemory, Tiers
from penstock.runtime.kv.pages.prompt_pages import Tokens, distinct, keys_of, pads_of
from penstock.runtime.kv.pages.restore import Restore
from penstock.runtime.kv.pages.reuse_facts import Totals
from penstock.runtime.kv.pages.strips import Strips, clear
from penstock.runtime.kv.pages.worth import Worth


class _Restored(NamedTuple):
    """What ``restore`` did for a batch, until it is confirmed."""

    prompts: Tokens
    keys: Sequence[Sequence[bytes]]
    found: Found
    declined: bool
    """More was found than was brought."""
    start: int
    tiers: Mapping[bytes, Tier]


class Prefix:
    """Restores the beginnings of a batch's prompts into KV buffers, and keeps what was computed.

    ``pairs`` in every method are K and V of all layers, [batch, heads, capacity, dim], in VRAM or, where there is a card, some in DRAM;
    token i of sequence b lies at row ``longest prompt - len(prompt b) + i``. One batch at a time, from one thread.

    ``memory`` and ``disk``, for pages of ``shape``, stay their giver's, who needs them until this is closed. Without ``disk`` pages live
    as long as this. ``settle`` returns, on another thread, once the KV that lies in DRAM is as computed.
    Threads: two for each of the ``readers`` that the disk wants, so that the drive works while read pages are checked; half of the cores
    for other checksums.
    """

    def __init__(
        self,
        shape: PageShape,
        plan: Plan,
        memory: PageMemory,
        disk: DiskPages | None,
        read_gbps: float,
        readers: int,
        settle: Callable[[], None] = lambda: None,
        warn: Warn = to_stderr,
    ):
        self._read_gbps = read_gbps
        self._namespace, self._tokens = shape.namespace, shape.page_tokens
        self._tiers = Tiers(shape, memory, disk)
        self._worth = Worth(plan, read_gbps)
        self._totals = Totals(shape.payload_bytes)
        ahead = 2 * readers
        self._readers = ThreadPoolExecutor(ahead, "kv-read")
        self._aside = ThreadPoolExecutor(max(1, usable_cores() // 2), "kv-check")
        self._restore = Restore(self._tiers, self._readers, ahead, self._aside, self._totals, warn)
        self._capture = Capture(self._tiers, ahead, self._aside, self._totals, settle)
        self._pads: list[int] = []
        self._strips: Strips | None = None
        self._pairs: Sequence[Pair] | None = None
        self._restored: _Restored | None = None

    def restore(self, prompts: Tokens, pairs: Sequence[Pair]) -> int:
        """Fill the rows before the returned one, the first that must be computed; padding there becomes zeros. On a card that is queued,
        not done: ordered before what is computed next, and not all of it is checked; see ``confirm``.

        Where some layers' KV lies in DRAM, and on the CPU, checks are over on return: there the computing thread itself writes pages to
        their rows, what would compute meanwhile are the cores that check, and layers that stream would be copied for the pass ahead
        with rows that may have to be taken back.
        """
        begun = time.perf_counter()
        self._capture.give_up()
        self._restore.confirm(0)  # of a batch that was broken off
        self._restore.release()
        strips = self._strips_of(pairs)
        self._pads = pads_of(prompts)
        keys = keys_of(self._namespace, prompts, self._tokens)
        found = look_up(self._tiers, prompts, keys, self._pads)
        chosen = choose(found, self._worth, len(prompts), max(map(len, prompts)))
        wanted = [page for page in found.pages if page.first_row < chosen]
        start, moved = self._restore.bring(wanted, found.tiers, chosen, strips)
        self._clear_padding(start, strips)
        if strips.on_host:
            start = self._restore.confirm(start)
        self._restored = _Restored(prompts, keys, found, chosen < found.start, start, moved)
        self._totals.restore_s += time.perf_counter() - begun
        return start

    def confirm(self) -> int:
        """After ``restore``, once: wait until all of it is checked -> the first row that must be computed, earlier than that of ``restore``
        where a page was no good. Whatever was computed from that row on is then wrong: nothing of it may be used or kept before this."""
        begun = time.perf_counter()
        prompts, keys, found, declined, brought, moved = self._restored
        start = self._restore.confirm(brought)
        for prompt, own, pad, tokens in zip(prompts, keys, self._pads, found.tokens, strict=True):
            rows = range(pad, start, self._tokens)
            parts = [(moved[key], min(self._tokens, start - row)) for key, row in zip(own, rows, strict=False)]
            self._totals.request(len(prompt), tokens, parts, declined=declined and tokens > 0)
        self._totals.moved(moved.values())
        self._totals.restore_s += time.perf_counter() - begun
        return start

    def keep(self, sequences: Tokens) -> None:
        """Remember the full pages of ``sequences``, the batch's prompts or what they have become, all of whose KV is computed; ``advance``
        and ``finish`` copy out what is neither in VRAM nor in DRAM. A page that the disk alone has was computed because that was faster
        than reading it, so it is worth room in DRAM. After ``confirm`` of the batch, any number of times."""
        pages = distinct(keys_of(self._namespace, sequences, self._tokens), self._pads, self._tokens)
        self._capture.add(page for page in pages if not self._tiers.is_in_memory(page.key))

    def advance(self, pairs: Sequence[Pair]) -> None:
        """Begin to copy out as many pages as can go without waiting, and return."""
        begun = time.perf_counter()
        self._restore.release()
        self._capture.advance(self._strips_of(pairs))
        self._totals.capture_s += time.perf_counter() - begun

    def finish(self, pairs: Sequence[Pair]) -> None:
        """Copy out what is left and wait until it lies in DRAM, but not for the disk. For a batch's end: the next ``restore`` gives up what
        was not copied out."""
        begun = time.perf_counter()
        self._restore.release()
        self._capture.finish(self._strips_of(pairs))
        self._totals.capture_s += time.perf_counter() - begun

    @property
    def pending(self) -> int:
        """Pages that are kept and were not yet copied out."""
        return self._capture.pending

    def close(self) -> None:
        """End the threads, once the disk has all that was copied out; the rest is lost. Nothing uses the memory any more."""
        self._capture.give_up()
        self._restore.release(wait=True)
        if self._tiers.disk is not None:
            self._tiers.disk.flush()
        self._readers.shutdown()
        self._aside.shutdown()

    def facts(self) -> dict[str, Any]:
        """For the report; all pages copied out so far are counted once the disk has them."""
        self._capture.give_up()
        disk, card = self._tiers.disk, self._tiers.card
        if disk is not None:
            disk.flush()
        return self._totals.facts(disk.counters() if disk is not None else None) | {
            "read_gbps": self._read_gbps if disk is not None and math.isfinite(self._read_gbps) else None,
            "vram_pages": card.slots.count if card is not None else 0,
            "dram_pages": self._tiers.dram.slots.count,
        }

    def _strips_of(self, pairs: Sequence[Pair]) -> Strips:
        if pairs is not self._pairs:
            if self._strips is None or not self._strips.fits(pairs):
                device = self._tiers.device
                self._strips = Strips(self._tiers.shape, pairs, device.holds if device is not None else lambda held: False)
            self._pairs = pairs
        return self._strips

    def _clear_padding(self, start: int, strips: Strips) -> None:
        for b, pad in enumerate(self._pads):
            rows = min(pad, start)
            if rows:
                clear(strips.on_host, b, rows)
                if self._tiers.device is not None:
                    self._tiers.device.launch(partial(clear, strips.on_card, b, rows))
