"""Which pages of the KV pool are free, and how many hold each of the others. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby


class PagePool:
    """``slots`` pages of ``page_tokens`` tokens, each free or held by one or more. Whoever takes or shares a page releases it.

    Pages that are taken together are adjacent where a hole is large enough: attention then reads a sequence as one strided view.
    """

    def __init__(self, slots: int, page_tokens: int):
        self.slots, self.page_tokens = slots, page_tokens
        self.on_short: Callable[[int], None] = lambda missing: None
        """Asked to release so many pages, if it can, when fewer are free than are to be taken."""
        self._references = [0] * slots
        self._kept = [0] * slots
        """Of these, those of :meth:`keep`."""
        self._free = self._available = slots

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free

    @property
    def available(self) -> int:
        """Pages that nobody computes with: those that are free, and those that are only kept, which ``on_short`` releases."""
        return self._available

    def references(self, page: int) -> int:
        """How many hold ``page``."""
        return self._references[page]

    def take(self, count: int, after: int | None = None) -> tuple[int, ...]:
        """``count`` free pages, each with one reference: those behind page ``after`` where they are free, else the first hole that fits,
        else what there is. RuntimeError where there are fewer."""
        if count > self._free:
            self.on_short(count - self._free)
        if count > self._free:
            raise RuntimeError(f"{count} pages of KV are wanted, {self._free} of {self.slots} are free")
        pages = self._adjacent(count, after)
        for page in pages:
            self._references[page] = 1
        self._free -= count
        self._available -= count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages that somebody holds already."""
        for page in pages:
            if not self._references[page]:
                raise RuntimeError(f"page {page} of KV is free and cannot be shared")
            self._add(page, 1, 0)

    def release(self, pages: Iterable[int]) -> None:
        """Give one reference of each page back."""
        for page in pages:
            if self._references[page] == self._kept[page]:
                raise RuntimeError(f"page {page} of KV was released twice")
            self._add(page, -1, 0)

    def keep(self, pages: Iterable[int]) -> None:
        """Hold pages that somebody holds already, until room is short: ``on_short`` lets go of them."""
        for page in pages:
            if not self._references[page]:
                raise RuntimeError(f"page {page} of KV is free and cannot be kept")
            self._add(page, 1, 1)

    def let_go(self, pages: Iterable[int]) -> None:
        """Undo one :meth:`keep` of each page."""
        for page in pages:
            if not self._kept[page]:
                raise RuntimeError(f"page {page} of KV is not kept")
            self._add(page, -1, -1)

    def _add(self, page: int, references: int, kept: int) -> None:
        self._available -= self._references[page] == self._kept[page]
        self._references[page] += references
        self._kept[page] += kept
        self._available += self._references[page] == self._kept[page]
        self._free += not self._references[page]

    def _adjacent(self, count: int, after: int | None) -> tuple[int, ...]:
        if after is not None and not any(self._references[after + 1 : after + 1 + count]) and after + count < self.slots:
            return tuple(range(after + 1, after + 1 + count))
        if count == 1:  # what a row takes while it decodes
            return (self._references.index(0),)
        holes = [list(run) for held, run in groupby(range(self.slots), lambda page: self._references[page] > 0) if not held]
        behind = [run for run in holes if after is not None and run[0] == after + 1]
        fitting = next((run for run in behind + holes if len(run) >= count), None)
        found = fitting if fitting is not None else [page for run in behind + sorted(holes, key=len, reverse=True) for page in run]
        return tuple(list(dict.fromkeys(found))[:count])
