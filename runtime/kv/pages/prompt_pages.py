"""The pages that prompts begin with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.disk.page_keys import ROOT

Tokens = Sequence[Sequence[int]]
"""Token ids of each sequence."""


class Page(NamedTuple):
    """A page that lies in the pool."""

    key: bytes
    parent: bytes
    slot: int


class OtherRanks(Protocol):
    """Those that have the same pages of other layers: a page is there where all have it. Their pools have this one's slots."""

    def find(self, keys: Sequence[bytes]) -> Mapping[bytes, Tier]:
        """The farthest tier of each of ``keys`` that all of them have."""

    def fetch(self, keys: Sequence[bytes]) -> None:
        """They begin to read these from disk to DRAM."""

    def bring(self, slots: Mapping[bytes, int]) -> set[bytes]:
        """They bring pages to these slots of their pools -> those that one of them could not, or found to be no good."""

    def put_by(self, pages: Sequence[Page], wait_s: float) -> None:
        """They copy these out of their pools, and wait so long for the disk to give them room."""

    def flush(self, seconds: float) -> None:
        """Return when their disks have all of it, or after so many seconds."""


def in_order(keys: Sequence[Sequence[bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """(key, parent) of each page of ``keys``, the pages of each sequence: every one once, first pages first."""
    known: set[bytes] = set()
    for i in range(max(map(len, keys), default=0)):
        for own in keys:
            if i < len(own) and own[i] not in known:
                known.add(own[i])
                yield own[i], own[i - 1] if i else ROOT
