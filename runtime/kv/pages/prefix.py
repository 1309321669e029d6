"""Prompts that begin alike are computed once: their KV pages are kept in the pool, in DRAM and on disk, and restored from the nearest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from penstock.planner.common.host_memory import usable_cores
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.disk.disk_pages import DiskPages, Warn, to_stderr
from penstock.runtime.kv.disk.page_keys import page_keys, salted
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.pages.capture import Capture
from penstock.runtime.kv.pages.find import agreed, choose, look_up
from penstock.runtime.kv.pages.page_ahead import fetch
from penstock.runtime.kv.pages.page_tiers import PageMemory, Tiers
from penstock.runtime.kv.pages.prompt_pages import OtherRanks, Page, in_order
from penstock.runtime.kv.pages.restore import Restore
from penstock.runtime.kv.pages.reuse_facts import Totals
from penstock.runtime.kv.pages.worth import Worth

Progress = Callable[[int, int], None]
_LOOK_S = 0.1
"""Seconds between two looks at an interrupt while the disk is waited for."""


class _Head(NamedTuple):
    """What a sequence got, until it is confirmed."""

    sequence: KvSequence
    keys: Sequence[bytes]
    """Of its pages that were there."""
    given: int
    """Of these, pages that it got."""
    declined: bool
    """More was found than was brought."""


class Prefix:
    """Gives sequences the prefixes of their prompts as pages of the pool, and keeps what was computed.

    A page in the pool is shared: nothing is copied. A page elsewhere is brought once, however many sequences begin with it. Sequences start
    where their own pages end, in pages of their own. One batch at a time, from one thread.

    ``memory`` and ``disk``, for pages of ``shape``, belong to the caller and must live until this is closed. Without ``disk`` pages live as
    long as this. ``settle`` returns, on another thread, once the KV in DRAM is as computed.
    ``others`` have the same pages of other layers: a prefix is restored as far as all have it, and is checked before it is computed with.
    ``flush_s`` is what all calls of :meth:`drain` and :meth:`flush` may take together. Threads: two for each of the ``readers`` that
    the disk needs, so that the drive works while pages are checked; half of the cores for other checksums.
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
        flush_s: float = math.inf,
        others: OtherRanks | None = None,
    ):
        self._flush_s = flush_s
        self._read_gbps, self._planned = read_gbps, plan.decisions.kv.reuse.vram_pages
        self._namespace, self._tokens = shape.namespace, shape.page_tokens
        self._pool, self._settle = memory.pool, settle
        self._tiers = Tiers(shape, memory, disk, lambda page: self._capture.rescue(page))
        self._worth = Worth(plan, read_gbps)
        self._totals = Totals(shape.payload_bytes)
        ahead = 2 * readers
        self._readers = ThreadPoolExecutor(ahead, "kv-read")
        self._aside = ThreadPoolExecutor(max(1, usable_cores() // 2), "kv-check")
        self._restore = Restore(self._tiers, self._readers, ahead, self._aside, self._totals, warn)
        self._capture = Capture(self._tiers, ahead, self._aside, self._totals, settle, others)
        self._others = others
        self._heads: list[_Head] = []
        self._moved: dict[bytes, Tier] = {}
        self._pool.on_short = self._make_room

    def restore(self, sequences: Sequence[KvSequence]) -> None:
        """Give each of ``sequences``, which hold no pages, those of its prompt's prefix, each with a reference. ``cached`` says how many
        tokens that is. On a card copies are queued and ordered before what is computed next; not all of it is checked: see ``confirm``.

        If some layers' KV lies in DRAM, and on the CPU, checks are over on return, for three reasons. The computing thread writes pages to
        their slots itself. The checking cores would compute meanwhile. Layers that stream would be copied for the next pass with pages that
        may be taken back.
        """
        self._restore.confirm()  # of a batch that was broken off
        self._heads, self._moved = [], {}
        self.restore_more(sequences)

    def restore_more(self, sequences: Sequence[KvSequence]) -> None:
        """``restore`` for sequences that join others, which were restored and are not confirmed yet: one ``confirm`` is for all."""
        begun = time.perf_counter()
        self._restore.release()
        prompts = [sequence.tokens for sequence in sequences]
        keys = [self._keys(sequence, len(sequence.tokens)) for sequence in sequences]
        found = look_up(self._tiers, prompts, keys)
        if self._others is not None:
            found = agreed(found, self._others, self._tiers)
        wanted, with_s, all_s = choose(found, self._worth, list(map(len, prompts)), self._tokens)
        if self._others is not None:
            self._others.fetch([key for own in wanted for key in own if found.tiers[key] is Tier.ssd])
        if self._tiers.slots.any_on_host:
            self._settle()
        slots, moved = self._restore.bring(wanted, found.tiers)
        brought = {key: slots[key] for key, tier in moved.items() if tier is not Tier.vram}
        lost = set[bytes]() if self._others is None else self._others.bring(brought)
        self._moved = moved | self._moved
        if self._totals.declined_s is None and wanted != found.keys:
            self._totals.declined_s = (with_s, all_s)
        for sequence, there, own in zip(sequences, found.keys, wanted, strict=True):
            given = next((i for i, key in enumerate(own) if key not in slots), len(own))
            sequence.pages = [slots[key] for key in own[:given]]
            self._pool.share(sequence.pages)
            sequence.cached = given * self._tokens
            self._heads.append(_Head(sequence, there, given, len(own) < len(there)))
        if self._tiers.slots.any_on_host or self._others is not None:
            self._cut(self._restore.confirm(lost))
        self._totals.restore_s += time.perf_counter() - begun

    def fetch(self, sequence: KvSequence) -> list[Future[None]]:
        """Begin to read to DRAM what the disk alone has of its prefix, where it pays and DRAM has room: a restore that comes once these are
        over waits for no disk. Empty where nothing is read."""
        keys = [self._keys(sequence, len(sequence.tokens))]
        found = look_up(self._tiers, [sequence.tokens], keys)
        if self._tiers.disk is None or self._others is not None or Tier.ssd not in found.tiers.values():
            return []
        (wanted,) = choose(found, self._worth, [len(sequence.tokens)], self._tokens).wanted
        far = [key for key in wanted if found.tiers[key] is Tier.ssd]
        if len(far) > self._tiers.dram.slots.count // 2:
            return []
        return fetch(far, self._tiers.disk, self._tiers.dram, self._readers)

    def fold(self) -> None:
        """What became of the requests so far is told in sums alone: a server has no end of them."""
        self._totals.fold()

    def confirm(self) -> None:
        """Call once after ``restore``: wait until all of it is checked. A sequence with a bad page loses its pages from there on, also
        those taken since, and ``cached`` says where it starts. What was computed after that is void and must not be kept."""
        begun = time.perf_counter()
        self._cut(self._restore.confirm())
        for head in self._heads:
            parts = [(self._moved[key], self._tokens) for key in head.keys[: head.given]]
            found = len(head.keys) * self._tokens
            self._totals.request(head.sequence.prompt_tokens, found, parts, declined=head.declined)
        self._totals.moved(self._moved.values())
        self._totals.restore_s += time.perf_counter() - begun
        self._heads, self._moved = [], {}

    def keep(self, sequences: Sequence[KvSequence]) -> None:
        """Remember the full pages of what ``sequences`` have cached; ``advance`` and ``finish`` copy out what is neither in the pool,
        where a card keeps it, nor in DRAM. A page that the disk alone has was computed because that was faster than reading it, so it is
        worth room in DRAM. After ``confirm`` of the batch, any number of times."""
        new: dict[bytes, Page] = {}
        keys = [self._keys(s, s.cached) for s in sequences]
        slots = {key: slot for own, s in zip(keys, sequences, strict=True) for key, slot in zip(own, s.pages, strict=False)}
        for key, parent in in_order(keys):
            if not self._tiers.is_in_memory(key):
                new[key] = Page(key, parent, slots[key])
                self._capture.add(new[key])
        if self._tiers.kept is not None:
            for page in reversed(new.values()):
                self._tiers.kept.add(page)

    def advance(self) -> None:
        """Begin to copy out as many pages as can go without waiting, and return."""
        begun = time.perf_counter()
        self._restore.release()
        self._capture.advance()
        self._totals.capture_s += time.perf_counter() - begun

    def finish(self) -> None:
        """Copy out what is left and wait until it lies in DRAM, but not for the disk. What finds no room there stays to be copied out until
        its slot is wanted."""
        begun = time.perf_counter()
        self._restore.release()
        self._capture.finish()
        self._totals.capture_s += time.perf_counter() - begun

    def drain(self, progress: Progress = lambda *_: None) -> None:
        """``finish``, and what found no room in DRAM waits for the disk to make some. ``progress`` gets pages and may raise."""
        begun = time.perf_counter()
        self._restore.release()
        try:
            self._capture.drain(time.monotonic() + self._flush_s, progress)
        finally:
            spent_s = time.perf_counter() - begun
            self._flush_s = max(0.0, self._flush_s - spent_s)
            self._totals.flush_s += spent_s

    def flush(self, progress: Progress = lambda *_: None) -> None:
        """At the end: ``drain``, and wait until the disk has all of it. What is left when the time is over is not kept."""
        self.drain(progress)
        begun, disk = time.perf_counter(), self._tiers.disk
        until_s = time.monotonic() + self._flush_s
        while disk is not None and not disk.flush(max(0.0, min(_LOOK_S, until_s - time.monotonic()))):
            if time.monotonic() >= until_s:
                disk.hurry()
                break
            progress(1, 1)
        if self._others is not None:
            self._others.flush(max(0.0, until_s - time.monotonic()))
        self._totals.late += self._capture.give_up()
        self._totals.flush_s += time.perf_counter() - begun

    @property
    def crowded(self) -> bool:
        """Whether what is still to be copied out takes slots of the pool that the next sequences may want."""
        return self._capture.pending > self._planned

    def forget(self) -> None:
        """Give up what only the pool has: what comes next is found in DRAM and on disk alone."""
        self._totals.late += self._capture.give_up()
        if self._tiers.kept is not None:
            self._tiers.kept.clear()

    @property
    def pending(self) -> int:
        """Pages that are kept and were not yet copied out."""
        return self._capture.pending

    def close(self) -> None:
        """End the threads, once the disk has all that was copied out; the rest is lost. Nothing uses the memory any more."""
        self._restore.confirm()
        self.forget()
        self._pool.on_short = lambda missing: None
        self._restore.release(wait=True)
        if self._tiers.disk is not None:
            self._tiers.disk.flush()
        self._readers.shutdown()
        self._aside.shutdown()

    def facts(self) -> dict[str, Any]:
        """For the report; all pages copied out so far are counted once the disk has them."""
        self._totals.late += self._capture.give_up()
        disk = self._tiers.disk
        if disk is not None:
            disk.flush()
        return self._totals.facts(disk.counters() if disk is not None else None) | {
            "page_tokens": self._tokens,
            "read_gbps": self._read_gbps if disk is not None and math.isfinite(self._read_gbps) else None,
            "vram_pages": self._planned,
            "dram_pages": self._tiers.dram.slots.count,
        }

    def _keys(self, sequence: KvSequence, tokens: int) -> list[bytes]:
        """Of the full pages of its first ``tokens``."""
        return page_keys(salted(self._namespace, sequence.salt), sequence.tokens[:tokens], self._tokens)

    def _cut(self, bad: set[bytes]) -> None:
        for i, (sequence, keys, given, declined) in enumerate(self._heads):
            sound = next((k for k, key in enumerate(keys[:given]) if key in bad), given)
            if sound < given:
                self._pool.release(sequence.pages[sound:])
                del sequence.pages[sound:]
                sequence.cached = sound * self._tokens
                self._heads[i] = _Head(sequence, keys, sound, declined)

    def _make_room(self, missing: int) -> None:
        """So many more pages of the pool are wanted than are free: pages that are only kept go, then those that wait to be copied out, no
        more of them than must."""
        wanted = self._pool.free + missing
        self._evict(wanted)
        for count in (wanted - self._pool.free, None):
            if self._pool.free < wanted:
                self._totals.skipped += self._capture.give_up(count)
                self._evict(wanted)

    def _evict(self, wanted: int) -> None:
        if self._tiers.kept is not None:
            self._tiers.kept.evict(max(0, wanted - self._pool.free))
