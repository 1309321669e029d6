"""Rows of a pass as numbers that a kernel reads: where each row's pages lie, and which tokens are its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from penstock.runtime.kv.attention.row_groups import Loose
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape
from penstock.runtime.model.rows import Step

Put = Callable[[Sequence[int]], torch.Tensor]
"""Brings numbers to the device, as int64."""


@dataclass(frozen=True)
class PageTables:
    """Some rows of a pass; all int64 on the device."""

    firsts: torch.Tensor
    """[rows]: each row's first token in the packed input."""
    starts: torch.Tensor
    """[rows]: tokens of its sequence before those."""
    counts: torch.Tensor
    """[rows]: its tokens in this pass."""
    ends: torch.Tensor
    """[rows]: tokens of its sequence after them, ``starts + counts``. Less where the row repeats its last token up to ``counts``: a kernel
    of a card computes each repetition as that token."""
    pages: torch.Tensor
    """[rows, most pages]: its pages in their order; behind the last one anything."""
    page_tokens: int
    most_tokens: int
    """Of a row in this pass."""
    most_keys: int
    """That a row's last token may see."""

    @classmethod
    def of(cls, rows: Sequence[Loose], page_tokens: int, put: Put) -> PageTables:
        used = [at.row.pages[: -(-at.row.end // page_tokens)] for at in rows]
        width, count = max(map(len, used)), len(rows)
        table = [page for pages in used for page in (*pages, *[0] * (width - len(pages)))]
        each = [(at.first, at.row.start, len(at.row.tokens), at.row.end) for at in rows]
        # each begins at a multiple of 16 bytes, whatever the rows: a kernel is compiled once more for addresses that do not
        even = [0] * (count % 2)
        columns = [(*column, *even) for column in zip(*each, strict=True)]
        *numbers, pages = put([*chain.from_iterable(columns), *table]).split([*[count + len(even)] * 4, count * width])
        firsts, starts, counts, ends = (column[:count] for column in numbers)
        most, keys = max(len(at.row.tokens) for at in rows), max(at.row.end for at in rows)
        return cls(firsts, starts, counts, ends, pages.view(count, width), page_tokens, most, keys)


def slots_of(step: Step, page_tokens: int, put: Put) -> torch.Tensor:
    """[tokens]: where each token of the packed input is written, in tokens of the pool."""
    return put([row.pages[t // page_tokens] * page_tokens + t % page_tokens for row in step.rows for t in range(row.start, row.end)])


@dataclass(frozen=True)
class Traits:
    """What attention of a layer does beside the plain product."""

    scaling: float
    window: int | None
    """Tokens that a token sees, itself counted; None: all before it."""
    softcap: float | None
    sinks: torch.Tensor | None
    """[heads]: a score of nothing."""
    slopes: torch.Tensor | None
    """[heads]: of ALiBi."""


class PagedKernel(Protocol):
    """Attention of many rows in one go."""

    @property
    def alone(self) -> bool:
        """Whether it computes one short row sooner than torch does."""

    def takes(self, query: torch.Tensor, shape: TokenShape) -> bool:
        """Whether it can compute with such queries [tokens, heads, dim]."""

    def attend(self, query: torch.Tensor, held: Pair, tables: PageTables, traits: Traits, out: torch.Tensor) -> None:
        """The rows of ``tables``: [tokens, heads, dim] over the pool's K and V [pool tokens, heads, dim] -> ``out`` [tokens, heads, dim of
        V], of which other rows stay as they are."""

    def write(self, held: Pair, new: Pair, slots: torch.Tensor) -> bool:
        """New K and V [1, heads, tokens, dim] to the tokens ``slots`` [tokens] of the pool's. Whether it could."""


class Elsewhere(Protocol):
    """Attention of some layers by somebody else, who has their K and V."""

    def attend(self, layer: int, shape: TokenShape, query: torch.Tensor, new: Pair | None, traits: Traits | None) -> torch.Tensor | None:
        """The pass in progress: queries [tokens, heads, dim]; new K and V [1, heads, tokens, dim], None where an earlier layer wrote them
        -> [tokens, heads, dim of V] on the device. None: it is computed here. ``traits`` are None where more than those is asked for."""
