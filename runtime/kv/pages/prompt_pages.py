"""The pages that a batch's sequences consist of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.runtime.kv.disk.page_keys import ROOT, page_keys

Tokens = Sequence[Sequence[int]]
"""Token ids of each sequence."""
Row = tuple[int, int]
"""A sequence of the batch, and a row of its KV."""


class Page(NamedTuple):
    """One page of a batch, however many of its sequences have it."""

    key: bytes
    parent: bytes
    rows: tuple[Row, ...]
    """Where it begins in each sequence that has it."""

    @property
    def first_row(self) -> int:
        return min(row for _, row in self.rows)


def pads_of(prompts: Tokens) -> list[int]:
    """Rows of padding before each prompt: they end in the same row."""
    longest = max(map(len, prompts))
    return [longest - len(p) for p in prompts]


def keys_of(namespace: bytes, sequences: Tokens, page_tokens: int) -> list[list[bytes]]:
    """Keys of each sequence's full pages."""
    return [page_keys(namespace, tokens, page_tokens) for tokens in sequences]


def distinct(keys: Sequence[Sequence[bytes]], pads: Sequence[int], page_tokens: int) -> list[Page]:
    """Each page of ``keys`` once, in the order of the rows that they begin with."""
    rows: dict[bytes, list[Row]] = {}
    parents: dict[bytes, bytes] = {}
    for b, own in enumerate(keys):
        parent = ROOT
        for i, key in enumerate(own):
            rows.setdefault(key, []).append((b, pads[b] + i * page_tokens))
            parents[key] = parent
            parent = key
    return sorted((Page(key, parents[key], tuple(at)) for key, at in rows.items()), key=lambda page: page.first_row)


def side_by_side(placed: Sequence[tuple[Page, int]], page_tokens: int) -> Iterator[tuple[Page, int, int]]:
    """(first page, first place, count) of each run of pages that follow one another both in their sequences and in their places."""
    begin = 0
    for end in range(1, len(placed) + 1):
        if end < len(placed):
            (last, at), (page, place) = placed[end - 1], placed[end]
            if place == at + 1 and page.rows == tuple((b, row + page_tokens) for b, row in last.rows):
                continue
        yield placed[begin][0], placed[begin][1], end - begin
        begin = end
