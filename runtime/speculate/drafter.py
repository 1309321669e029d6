"""What proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Proposes what comes next. Its proposals change how long a reply takes, never what it says."""

    def propose(self, number: int, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Up to ``most`` tokens that may follow ``tokens``, those of sequence ``number`` so far; none where nothing suggests itself."""

    def forget(self, number: int) -> None:
        """Sequence ``number`` has ended."""
