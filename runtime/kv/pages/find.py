"""Which pages of a batch's prompts are there, and how many of them it pays to restore."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.planner.contract.decided.decisions import Tier
from penstock.runtime.kv.pages.page_tiers import Tiers
from penstock.runtime.kv.pages.prompt_pages import Page, Tokens, distinct
from penstock.runtime.kv.pages.worth import Worth


class Found(NamedTuple):
    pages: list[Page]
    """What the prompts begin with, as far as it is there without a gap, in the order of its rows."""
    tiers: dict[bytes, Tier]
    tokens: list[int]
    """Of each prompt, in such pages. The last token of a prompt is always computed."""
    start: int
    """First row that must be computed when all pages are restored."""


def look_up(tiers: Tiers, prompts: Tokens, keys: Sequence[Sequence[bytes]], pads: Sequence[int]) -> Found:
    """``keys`` are those of the prompts' full pages. A few microseconds a page."""
    size = tiers.shape.page_tokens
    where: dict[bytes, Tier] = {}
    there: list[Sequence[bytes]] = []
    for prompt, own in zip(prompts, keys, strict=True):
        own = own[: (len(prompt) - 1) // size]
        for i, key in enumerate(own):
            tier = where.get(key) or tiers.nearest(key)
            if tier is None:
                own = own[:i]
                break
            where[key] = tier
        there.append(own)
    tokens = [len(own) * size for own in there]
    start = min(pad + n for pad, n in zip(pads, tokens, strict=True))
    return Found(distinct(there, pads, size), where, tokens, start)


def choose(found: Found, worth: Worth, batch: int, length: int) -> int:
    """The row to begin computing at that is predicted to be fastest: 0, or where the pages of the nearest tier end, of the two nearest, of
    all three."""
    nearest: set[Tier] = set()
    fastest, least_s = 0, worth.prefill_s(batch, length, 0)
    for tier in Tier:
        nearest.add(tier)
        farther = (page.first_row for page in found.pages if found.tiers[page.key] not in nearest)
        start = min(found.start, next(farther, found.start))
        if start > fastest:
            pages = Counter(found.tiers[page.key] for page in found.pages if page.first_row < start)
            seconds = worth.restore_s(pages) + worth.prefill_s(batch, length, start)
            if seconds < least_s:
                fastest, least_s = start, seconds
    return fastest
