"""What proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.runtime.kv.batch.kv_sequence import KvSequence

Drafts = Sequence[Sequence[int]]
"""Of each row the tokens that may follow its own."""


class Proposer(Protocol):
    """Proposes what comes next. Its proposals change how long a reply takes, never what it says.

    A row is known by its number. Its tokens only grow until :meth:`forget`; drafts are not among them.
    """

    def read(self, rows: Sequence[KvSequence]) -> None:
        """Take in what each of ``rows`` has said since the last call: a whole prompt at first. Its seconds are not booked as drafting."""

    def propose(self, rows: Sequence[KvSequence], most: Sequence[int]) -> Drafts:
        """For each of ``rows``, which were read, as many tokens as ``most`` says for it, or fewer; none where nothing suggests itself."""

    def rest(self, number: int) -> None:
        """Sequence ``number`` waits, and is asked of again later: others may have its memory meanwhile."""

    def forget(self, number: int) -> None:
        """Sequence ``number`` has ended."""
