"""Kept KV pages of a dealt model: each rank has those of its own layers, and does with them what rank 0 does with its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from penstock.planner.common.host_memory import usable_cores
from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.kv.disk.disk_pages import DiskPages, Warn, to_stderr
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.pages.capture import Capture
from penstock.runtime.kv.pages.page_ahead import fetch
from penstock.runtime.kv.pages.page_tiers import PageMemory, Tiers
from penstock.runtime.kv.pages.prompt_pages import Page
from penstock.runtime.kv.pages.restore import Restore
from penstock.runtime.kv.pages.reuse_facts import Totals
from penstock.runtime.ranks.followers import Leading

Words = dict[str, Any]
TIERS = tuple(Tier)
"""From the nearest to the farthest."""


class PagesElsewhere:
    """``kv.pages.prompt_pages.OtherRanks``: the pages of the ranks that ``leading`` leads."""

    def __init__(self, leading: Leading):
        self._leading = leading

    def find(self, keys: Sequence[bytes]) -> Mapping[bytes, Tier]:
        answers = self._leading.ask_pages("find", keys=_told(keys))
        each = zip(keys, *(answer["tiers"] for answer in answers), strict=True)
        return {key: max(map(Tier, tiers), key=TIERS.index) for key, *tiers in each if all(tiers)}

    def fetch(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._leading.tell_pages("fetch", keys=_told(dict.fromkeys(keys)))

    def bring(self, slots: Mapping[bytes, int]) -> set[bytes]:
        answers = self._leading.ask_pages("bring", keys=_told(slots), slots=[*slots.values()]) if slots else []
        return {key for answer in answers for key in _heard(answer["lost"])}

    def put_by(self, pages: Sequence[Page], wait_s: float) -> None:
        keys, parents = _told(page.key for page in pages), _told(page.parent for page in pages)
        self._leading.tell_pages("put_by", keys=keys, parents=parents, slots=[page.slot for page in pages], wait_s=wait_s)

    def flush(self, seconds: float) -> None:
        self._leading.ask_pages("flush", seconds=seconds)


class LedPages:
    """The pages of one rank's layers, in DRAM and in ``disk``. Which page lies in which slot of the pool is rank 0's to say.

    ``memory`` and ``disk``, for pages of ``shape``, belong to the caller and must live until this is closed. Threads as those of
    ``kv.pages.prefix.Prefix``.
    """

    def __init__(
        self, shape: PageShape, memory: PageMemory, disk: DiskPages | None, readers: int, settle: Callable[[], None], warn: Warn = to_stderr
    ):
        self._tiers = Tiers(shape, replace(memory, pool=_ToldPool(memory.pool)), disk, lambda page: None)
        self._tiers.kept = None
        ahead = 2 * readers
        self._readers = ThreadPoolExecutor(ahead, "kv-read")
        self._aside = ThreadPoolExecutor(max(1, usable_cores() // 2), "kv-check")
        self._settle, self._totals = settle, Totals(shape.payload_bytes)
        self._restore = Restore(self._tiers, self._readers, ahead, self._aside, self._totals, warn)
        self._capture = Capture(self._tiers, ahead, self._aside, self._totals, settle)
        self._fetching: list[Future[None]] = []

    def do(self, words: Words) -> Words | None:
        """What :class:`PagesElsewhere` says -> what it is answered, None where nothing is."""
        keys = _heard(words.get("keys", ()))
        match words["do"]:
            case "find":
                return {"tiers": [self._tiers.nearest(key) for key in keys]}
            case "fetch":
                self._fetch(keys)
            case "bring":
                return {"lost": _told(self._bring(dict(zip(keys, words["slots"], strict=True))))}
            case "put_by":
                self._put_by(list(map(Page, keys, _heard(words["parents"]), words["slots"])), words["wait_s"])
            case "flush":
                self._flush(words["seconds"])
                return {}
            case other:
                raise RuntimeError(f"rank 0 says {other!r} of kept pages")
        return None

    def _fetch(self, keys: Sequence[bytes]) -> None:
        if self._tiers.disk is not None:
            self._fetching += fetch(
                (key for key in keys if key not in self._tiers.dram.slots), self._tiers.disk, self._tiers.dram, self._readers
            )

    def _bring(self, slots: Mapping[bytes, int]) -> set[bytes]:
        for read in self._fetching:
            read.result()
        self._fetching.clear()
        if self._tiers.slots.any_on_host:
            self._settle()
        where = {key: self._tiers.nearest(key) or Tier.ssd for key in slots}
        brought = self._restore.bring([[key] for key in slots], where, slots.__getitem__)
        self._totals.moved(brought.tiers.values())
        return self._restore.confirm() | (slots.keys() - brought.slots.keys())

    def _put_by(self, pages: Iterable[Page], wait_s: float) -> None:
        """Slots of the pool are others' as soon as this returns, for what is queued from then on."""
        self._restore.release()
        for page in pages:
            if page.key not in self._tiers.dram.slots:
                self._capture.add(page)
        self._capture.send()
        if self._capture.pending and wait_s:
            self._capture.drain(time.monotonic() + wait_s, lambda done, total: None)
        if self._capture.pending:
            self._totals.skipped += self._capture.give_up()

    def _flush(self, seconds: float) -> None:
        self._capture.finish()
        disk = self._tiers.disk
        if disk is not None and not disk.flush(seconds if math.isfinite(seconds) else None):
            disk.hurry()

    def facts(self) -> dict[str, Any]:
        """As those of ``kv.pages.prefix.Prefix``, of this rank's layers."""
        disk = self._tiers.disk
        return self._totals.facts(None if disk is None else disk.counters())

    def close(self) -> None:
        """End the threads, once the disk has all that was copied out. Nothing uses the memory any more."""
        self._restore.confirm()
        self._capture.finish()
        self._restore.release(wait=True)
        if self._tiers.disk is not None:
            self._tiers.disk.flush()
        self._readers.shutdown()
        self._aside.shutdown()


class _ToldPool(PagePool):
    """The pool of a rank that follows: who holds a slot is counted by rank 0."""

    def __init__(self, pool: PagePool):
        super().__init__(pool.slots, pool.page_tokens)

    def share(self, pages: Iterable[int]) -> None: ...
    def release(self, pages: Iterable[int]) -> None: ...
    def keep(self, pages: Iterable[int]) -> None: ...
    def let_go(self, pages: Iterable[int]) -> None: ...


def _told(keys: Iterable[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _heard(keys: Iterable[str]) -> list[bytes]:
    return list(map(bytes.fromhex, keys))
