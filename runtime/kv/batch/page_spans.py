"""Which pages follow one another, and which bytes of a layer's buffer some tokens take. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of adjacent pages, in order."""
    begin = 0
    for end in range(1, len(pages) + 1):
        if end == len(pages) or pages[end] != pages[end - 1] + 1:
            yield pages[begin], end - begin
            begin = end


def spans(pages: Sequence[int], first: int, end: int, page_tokens: int, token_bytes: int) -> list[tuple[int, int]]:
    """(begin, end) in bytes of tokens ``first`` to ``end`` of the sequence that lies in ``pages``, in order; neighbours are one."""
    if end <= first:
        return []
    held = pages[first // page_tokens : -(-end // page_tokens)]
    found, at = [], first - first % page_tokens
    for page, count in runs(held):
        skipped, over = max(0, first - at), max(0, at + count * page_tokens - end)
        begin = page * page_tokens + skipped
        found.append((begin * token_bytes, ((page + count) * page_tokens - over) * token_bytes))
        at += count * page_tokens
    return found
