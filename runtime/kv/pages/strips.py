"""Where the bytes of a page belong in the KV buffers of a batch, in as few strided copies as the buffers allow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.planner.common.errors import UserError
from penstock.runtime.kv.batch.contiguous import Pair
from penstock.runtime.kv.disk.page_record import PageShape

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What elements are copied as: wider words take fewer instructions."""


@dataclass(frozen=True)
class Piece:
    """K or V of one layer: where it lies in memory, and at which byte of a page."""

    held: torch.Tensor
    at: int


@dataclass(frozen=True)
class Strip:
    """Pieces at equal distances in memory and in a page: one copy for all of them."""

    held: torch.Tensor
    """[pieces, batch, heads, capacity, words]"""
    at: int
    """Word of a page at which the first piece begins."""
    step: int
    """Words from piece to piece in a page."""
    tokens: int
    """Of a page."""

    def place(self, pages: torch.Tensor, sequence: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of ``sequence`` from ``row`` on that consecutive ``pages`` hold, uint8 [n, bytes], and their bytes in the pages: both as
        [pieces, heads, n, tokens, words]."""
        pieces, _, heads, _, words = self.held.shape
        flat = pages.view(self.held.dtype)
        strides = (self.step, self.tokens * words, flat.stride(0), words, 1)
        in_pages = flat.as_strided((pieces, heads, len(pages), self.tokens, words), strides, flat.storage_offset() + self.at)
        rows = self.held[:, sequence, :, row : row + len(pages) * self.tokens]
        return rows.unflatten(2, (len(pages), self.tokens)), in_pages


class Strips:
    """How a page of ``shape`` lies in ``pairs``, K and V of all layers, [batch, heads, capacity, dim] each; ``on_card`` tells which of them
    are in the card's memory, the others are in DRAM.

    On one device all layers take two copies, one for K and one for V, where they lie at equal distances in one allocation. UserError when
    the model's KV is not of ``shape``.
    """

    def __init__(self, shape: PageShape, pairs: Sequence[Pair], on_card: Callable[[torch.Tensor], bool]):
        self._key = _identity(pairs)
        there: list[Piece] = []
        here: list[Piece] = []
        for piece in _pieces(shape, pairs):
            (there if on_card(piece.held) else here).append(piece)
        self.on_card, self.on_host = (_strips(pieces, shape.page_tokens) for pieces in (there, here))
        self.card_ranges = _ranges((p.at, p.at + _nbytes(p, shape.page_tokens)) for p in there)
        """(start, end) of a page's bytes that belong on the card."""

    def fits(self, pairs: Sequence[Pair]) -> bool:
        """Whether these are the buffers that this is about."""
        return self._key == _identity(pairs)


def scatter(strips: Sequence[Strip], pages: torch.Tensor, sequence: int, row: int) -> None:
    """Write consecutive ``pages`` of a sequence, uint8 [n, bytes], to ``row`` and the following ones: one kernel a strip."""
    for strip in strips:
        rows, in_pages = strip.place(pages, sequence, row)
        rows.copy_(in_pages)


def gather(strips: Sequence[Strip], pages: torch.Tensor, sequence: int, row: int) -> None:
    """The same in the other direction."""
    for strip in strips:
        rows, in_pages = strip.place(pages, sequence, row)
        in_pages.copy_(rows)


def gather_aside(strips: Sequence[Strip], pages: torch.Tensor, sequence: int, row: int) -> None:
    """``gather`` of what lies in DRAM by the calling thread alone: torch's own copy takes every core, which others compute with."""
    for strip in strips:
        rows, in_pages = strip.place(pages, sequence, row)
        np.copyto(in_pages.numpy(), rows.numpy())


def clear(strips: Iterable[Strip], sequence: int, rows: int) -> None:
    """Zeros in the first ``rows`` of a sequence."""
    for strip in strips:
        strip.held[:, sequence, :, :rows] = 0


def _pieces(shape: PageShape, pairs: Sequence[Pair]) -> list[Piece]:
    pieces, at = [], 0
    for i, pair in enumerate(pairs):
        for held in pair:
            pieces.append(Piece(held, at))
            at += _nbytes(pieces[-1], shape.page_tokens)
        if at != (i + 1) * shape.layer_bytes:
            raise _other_shape(shape)
    if at != shape.payload_bytes:
        raise _other_shape(shape)
    return pieces


def _nbytes(piece: Piece, tokens: int) -> int:
    return piece.held.shape[1] * tokens * piece.held.shape[3] * piece.held.element_size()


def _strips(pieces: Sequence[Piece], tokens: int) -> list[Strip]:
    """K and V apart, so that layers need not be neighbours in a page to lie at equal distances there."""
    out = []
    for side in (pieces[::2], pieces[1::2]):
        run: list[Piece] = []
        for piece in side:
            if run and not _goes_on(run, piece):
                out.append(_strip(run, tokens))
                run = []
            run.append(piece)
        if run:
            out.append(_strip(run, tokens))
    return out


def _goes_on(run: Sequence[Piece], piece: Piece) -> bool:
    """Whether ``piece`` lies as far from the last one of ``run`` as those lie from each other."""
    last, held = run[-1], piece.held
    if (held.shape, held.stride(), held.dtype) != (last.held.shape, last.held.stride(), last.held.dtype):
        return False
    if held.untyped_storage().data_ptr() != last.held.untyped_storage().data_ptr():
        return False
    distance = _distance(last, piece)
    return distance[0] > 0 and (len(run) < 2 or distance == _distance(run[-2], last))


def _distance(one: Piece, other: Piece) -> tuple[int, int]:
    """Elements in memory, bytes in a page."""
    return other.held.storage_offset() - one.held.storage_offset(), other.at - one.at


def _strip(run: Sequence[Piece], tokens: int) -> Strip:
    first = run[0].held
    elements, step = _distance(run[0], run[1]) if len(run) > 1 else (0, 0)
    held = first.as_strided((len(run), *first.shape), (elements, *first.stride()), first.storage_offset())
    width = math.gcd(8, first.shape[3] * first.element_size())
    return Strip(held.view(_WORDS[width]), run[0].at // width, step // width, tokens)


def _ranges(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending spans, neighbours made one."""
    out: list[tuple[int, int]] = []
    for start, end in spans:
        if out and out[-1][1] == start:
            start = out.pop()[0]
        out.append((start, end))
    return out


def _identity(pairs: Sequence[Pair]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((held.data_ptr(), tuple(held.shape)) for pair in pairs for held in pair)


def _other_shape(shape: PageShape) -> UserError:
    return UserError(
        f"kv.dir: the model's KV is not {shape.layers} layers of {shape.layer_bytes} bytes for {shape.page_tokens} tokens, "
        "as its geometry says; leave kv.dir out"
    )
