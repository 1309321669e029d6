"""The L1 tier of the KV prefix cache: pages of the pool that stay when nobody computes with them any more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from penstock.runtime.kv.batch.page_pool import PagePool
from penstock.runtime.kv.pages.prompt_pages import Page


class PoolPages:
    """Which page lies in which slot of ``pool``, least recently used first. Each holds one reference to its slot, so a sequence that
    begins with it shares the slot, and nothing is copied. Pages stay while the pool has room for what sequences take.

    ``on_evicted`` gets a page before its slot is given away. Costs no memory but the index. One thread.
    """

    def __init__(self, pool: PagePool, on_evicted: Callable[[Page], None]):
        self._pool, self._on_evicted = pool, on_evicted
        self._pages: OrderedDict[bytes, Page] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, key: bytes) -> int | None:
        """The slot of a page, which counts as a use."""
        if key not in self._pages:
            return None
        self._pages.move_to_end(key)
        return self._pages[key].slot

    def add(self, page: Page) -> None:
        """Keep a page that somebody holds; one that is kept already stays where it is."""
        if page.key not in self._pages:
            self._pool.keep([page.slot])
            self._pages[page.key] = page

    def evict(self, count: int) -> int:
        """Give up to ``count`` pages away that nobody else holds -> how many."""
        idle = (page for page in self._pages.values() if self._pool.references(page.slot) == 1)
        evicted = list(islice(idle, count))
        for page in evicted:
            self._on_evicted(page)
        self._drop(evicted)
        return len(evicted)

    def clear(self) -> None:
        """Forget all pages; those that others hold stay theirs."""
        self._drop(list(self._pages.values()))

    def _drop(self, pages: Iterable[Page]) -> None:
        for page in pages:
            del self._pages[page.key]
            self._pool.let_go([page.slot])
