"""Pages by their count alone, as a simulation has them: prompts share their beginning, and nothing is restored."""

from __future__ import annotations


class CountedPages:
    """``pages`` of ``page_tokens`` tokens. All prompts begin with the same ``shared_tokens``, of which whole pages are shared: once one
    prompt was computed, they stay until their room is needed and nobody computes with them."""

    def __init__(self, pages: int, page_tokens: int, shared_tokens: int = 0):
        self.pages, self.page_tokens = pages, page_tokens
        self._free = pages
        """Kept ones, too, where nobody computes with them."""
        self._held: dict[int, int] = {}
        """Of each number, beside those that it shares."""
        self._shared = shared_tokens // page_tokens
        self._kept = False
        self._sharers: set[int] = set()

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free

    def prefix(self, number: int) -> int:
        """Tokens that it need not compute: those of the shared pages, which it holds from now on."""
        if not self._kept:
            return 0
        if not self._sharers:
            self._free -= self._shared
        self._sharers.add(number)
        return self._shared * self.page_tokens

    def hold(self, number: int, tokens: int) -> bool:
        """Room for so many tokens of ``number``. False: nothing was taken."""
        missing = self._own(number, tokens) - self._held.get(number, 0)
        if missing > self._free:
            return False
        if missing > 0:
            if missing > self._free - self._shared and not self._sharers:
                self._kept = False
            self._held[number] = self._held.get(number, 0) + missing
            self._free -= missing
        return True

    def trim(self, number: int, tokens: int) -> None:
        """What it holds beyond so many tokens is free again."""
        spare = self._held.get(number, 0) - self._own(number, tokens)
        if spare > 0:
            self._held[number] -= spare
            self._free += spare

    def keep(self, number: int) -> None:
        """Its prompt is computed: others may share how it begins, unless they share another's."""
        if self._shared and not self._kept and self._held.get(number, 0) >= self._shared:
            self._kept = True
            self._sharers = {number}
            self._held[number] -= self._shared

    def release(self, number: int) -> None:
        """What it holds is free again."""
        self._free += self._held.pop(number, 0)
        if number in self._sharers:
            self._sharers.remove(number)
            self._free += 0 if self._sharers else self._shared

    def _own(self, number: int, tokens: int) -> int:
        return max(0, -(-tokens // self.page_tokens) - self._shared * (number in self._sharers))
