"""The text of one reply as its tokens come: no half characters, and nothing of a stop string or behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.runtime.told.piecewise import BROKEN, PieceByPiece


class ReplyText:
    """What may be sent of a reply. Text that may be the beginning of one of ``stops`` is kept back until more is there."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str], alone: Callable[[int], str | None] = lambda token: None):
        """``alone``: what a token adds to any text, where that is known without the tokens before it."""
        self._pieces, self._stops = PieceByPiece(decode, alone), tuple(stops)
        self._kept = ""
        self.stop: str | None = None
        """The stop string that came; nothing is said behind it."""

    def add(self, tokens: Sequence[int]) -> str:
        """What ``tokens`` add to the text; empty once ``stop`` is set."""
        add = self._pieces.add
        new = add(tokens[0]) if len(tokens) == 1 else "".join([add(token) for token in tokens])
        return new if not self._stops else self._checked(new)

    def rest(self) -> str:
        """What is left when the reply is over. A character whose last bytes never came is left out."""
        told = self._checked(self._pieces.rest().rstrip(BROKEN))
        if self.stop is None:
            told, self._kept = told + self._kept, ""
        return told

    def _checked(self, new: str) -> str:
        if self.stop is not None:
            return ""
        self._kept += new
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._kept.find(stop)) >= 0]
        if found:
            at, _, self.stop = min(found)
            told, self._kept = self._kept[:at], ""
            return told
        keep = max((_begun(self._kept, stop) for stop in self._stops), default=0)
        told, self._kept = self._kept[: len(self._kept) - keep], self._kept[len(self._kept) - keep :]
        return told


def _begun(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that begin ``mark``."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
