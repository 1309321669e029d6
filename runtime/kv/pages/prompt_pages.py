"""The pages that prompts begin with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.runtime.kv.disk.page_keys import ROOT

Tokens = Sequence[Sequence[int]]
"""Token ids of each sequence."""


class Page(NamedTuple):
    """A page that lies in the pool."""

    key: bytes
    parent: bytes
    slot: int


def in_order(keys: Sequence[Sequence[bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """(key, parent) of each page of ``keys``, the pages of each sequence: every one once, first pages first."""
    known: set[bytes] = set()
    for i in range(max(map(len, keys), default=0)):
        for own in keys:
            if i < len(own) and own[i] not in known:
                known.add(own[i])
                yield own[i], own[i - 1] if i else ROOT
