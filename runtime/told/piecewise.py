"""A text that comes token by token."""

from __future__ import annotations

from collections.abc import Callable

BROKEN = "\ufffd"
"""What half a character is decoded as."""
HELD = 32
"""Tokens that are held back at most. A character has four bytes: so many without an end are bytes of none, or tokens without text."""


class PieceByPiece:
    """What each token adds to a text, by looking at the few before it: a tokenizer's ``decode`` of a token alone loses spaces and halves
    of characters. Of tokens that ``alone`` knows the text of, wherever they stand, nothing is decoded."""

    def __init__(self, decode: Callable[[list[int]], str], alone: Callable[[int], str | None] = lambda token: None):
        self._decode, self._alone = decode, alone
        self._ids: list[int] = []
        self._from, self._told = 0, 0

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def add(self, token: int) -> str:
        """What ``token`` adds. A character of several tokens comes with the last of them."""
        ids, whole = self._ids, len(self._ids) == self._told
        ids.append(token)
        if whole and (known := self._alone(token)) is not None:
            self._from, self._told = self._told, len(ids)
            return known
        new = self._new()
        if (not new or new.endswith(BROKEN)) and len(self._ids) - self._told < HELD:
            return ""
        self._from, self._told = self._told, len(self._ids)
        return new

    def rest(self) -> str:
        """What is left at the end: a character that was never completed."""
        new = self._new()
        self._from = self._told = len(self._ids)
        return new

    def _new(self) -> str:
        before, now = (self._decode(self._ids[self._from : end]) for end in (self._told, None))
        return now[len(before) :]
