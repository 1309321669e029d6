"""Prompts that begin alike share pages of the pool, where a plan has no other place for kept pages."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.kv.disk.page_keys import ROOT, page_keys, salted
from penstock.runtime.kv.pages.pool_pages import PoolPages
from penstock.runtime.kv.pages.prompt_pages import Page

NAMESPACE = bytes(len(ROOT))
"""Of one model in one process, nothing need be told apart."""


class PoolPrefix:
    """As ``Prefix`` gives and keeps pages, with the pool as its only tier. Nothing is copied; a page that is evicted is lost."""

    def __init__(self, pool: PagePool):
        self._pool = pool
        self._kept = PoolPages(pool, lambda page: None)
        pool.on_short = self._make_room

    def restore_more(self, sequences: Sequence[KvSequence]) -> None:
        """Give each of ``sequences``, which hold no pages, those of its prefix: whole pages, and less than its tokens."""
        for sequence in sequences:
            slots = []
            for key in self._keys(sequence, len(sequence.tokens) - 1):
                slot = self._kept.find(key)
                if slot is None:
                    break
                slots.append(slot)
            self._pool.share(slots)
            sequence.pages, sequence.cached = slots, len(slots) * self._pool.page_tokens

    def fetch(self, sequence: KvSequence) -> list[Future[None]]:
        """There is nothing to fetch from."""
        return []

    def fold(self) -> None:
        """Nothing is counted here."""

    def confirm(self) -> None:
        """Nothing was moved, so nothing can be damaged."""

    def keep(self, sequences: Sequence[KvSequence]) -> None:
        """The full pages of what ``sequences`` have cached stay while there is room."""
        for sequence in sequences:
            keys = self._keys(sequence, sequence.cached)
            pages = [Page(key, parent, slot) for key, parent, slot in zip(keys, [ROOT, *keys], sequence.pages, strict=False)]
            for page in reversed(pages):  # what a prefix begins with is of use to more prompts than what it ends with
                self._kept.add(page)

    def advance(self) -> None:
        """There is no other place."""

    @property
    def pending(self) -> int:
        """Pages that are to be copied out."""
        return 0

    def _keys(self, sequence: KvSequence, tokens: int) -> list[bytes]:
        return page_keys(salted(NAMESPACE, sequence.salt), sequence.tokens[:tokens], self._pool.page_tokens)

    def _make_room(self, missing: int) -> None:
        self._kept.evict(missing)
