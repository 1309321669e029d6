"""Pages by their count alone, as a simulation has them: nothing is shared, nothing is restored."""

from __future__ import annotations


class CountedPages:
    """``pages`` of ``page_tokens`` tokens."""

    def __init__(self, pages: int, page_tokens: int):
        self.pages, self.page_tokens = pages, page_tokens
        self._free = pages
        self._held: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free

    def prefix(self, number: int) -> int:
        """No prompt begins like another."""
        return 0

    def hold(self, number: int, tokens: int) -> bool:
        """Room for so many tokens of ``number``. False: nothing was taken."""
        missing = -(-tokens // self.page_tokens) - self._held.get(number, 0)
        if missing > self._free:
            return False
        if missing > 0:
            self._held[number] = self._held.get(number, 0) + missing
            self._free -= missing
        return True

    def trim(self, number: int, tokens: int) -> None:
        """What it holds beyond so many tokens is free again."""
        spare = self._held.get(number, 0) - -(-tokens // self.page_tokens)
        if spare > 0:
            self._held[number] -= spare
            self._free += spare

    def release(self, number: int) -> None:
        """What it holds is free again."""
        self._free += self._held.pop(number, 0)
