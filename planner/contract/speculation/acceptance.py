"""How often drafted tokens are kept, learnt while they are."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 256.0
"""Drafted tokens that count: text changes, and what was learnt of the last paragraph says most of the next."""


@dataclass
class Acceptance:
    """The share of drafted tokens that are right, of those whose forerunners were. ``tried`` tokens with the share ``share`` are what is
    known at first."""

    share: float
    tried: float = 8.0

    def book(self, drafted: int, kept: int) -> None:
        """A chain of ``drafted`` tokens, of which the first ``kept`` were right: the next one was tried, those behind it were not."""
        tried = kept + (kept < drafted)
        if not tried:
            return
        total = self.tried + tried
        self.share = (self.share * self.tried + kept) / total
        self.tried = min(total, MEMORY)
