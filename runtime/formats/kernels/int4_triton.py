"""Triton for whole numbers in 32-bit words: decoding in every order, and products of few rows with matrices packed along their columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.runtime.formats.kernels.int4_row_triton import FAR, NEAR, one_row
from penstock.runtime.formats.kernels.int4_tiles_triton import TileProducts
from penstock.runtime.formats.kernels.launching import Launcher

MOST_TOKENS = 16
"""Of a product from the stored form."""
_SHARES_EACH = 4
"""Programs for each processor that a product of several tokens makes of its columns, at most."""


@triton.jit
def _decode(
    words, scales, zeros, order, out, rows, columns, group, groups,
    w_row, w_column, s_row, s_group, z_row, z_group,
    BITS: tl.constexpr, BY_ROWS: tl.constexpr, AWQ: tl.constexpr, ZEROS: tl.constexpr, LESS_ONE: tl.constexpr, ORDER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile: ``(number - zero) * scale``. A word holds numbers of adjacent columns, or of adjacent rows (``BY_ROWS``)."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    per: tl.constexpr = 32 // BITS
    mask: tl.constexpr = (1 << BITS) - 1
    lane = row % per
    if AWQ:
        lane = (lane % 2) * 4 + lane // 2
    if BY_ROWS:
        at = (row // per)[:, None] * w_row + column[None, :] * w_column
        number = (tl.load(words + at, inside, 0) >> (lane * BITS).to(tl.int32)[:, None]) & mask
    else:
        at = row[:, None] * w_row + (column // per)[None, :] * w_column
        number = (tl.load(words + at, inside, 0) >> (column % per * BITS)[None, :]) & mask
    member = column // group
    if ORDER:
        named = tl.load(order + column, column < columns, 0)
        member = tl.minimum(tl.where(named < 0, member, named), groups - 1)
    scale = tl.load(scales + row[:, None] * s_row + member[None, :] * s_group, inside, 0.0)
    if ZEROS:
        held = tl.load(zeros + (row // per)[:, None] * z_row + member[None, :] * z_group, inside, 0)
        zero = (held >> (lane * BITS).to(tl.int32)[:, None]) & mask
        if LESS_ONE:
            zero = (zero + 1) & mask
        number -= zero
    else:
        number -= 1 << (BITS - 1)
    value = (number.to(tl.float32) * scale.to(tl.float32)).to(scales.dtype.element_ty)
    tl.store(out + row[:, None] * columns + column[None, :], value.to(out.dtype.element_ty), inside)


@triton.jit
def _decode_words(
    words, scales, zeros, out, rows, width, group_words, w_row, s_row, z_row, z_group,
    BITS: tl.constexpr, SIGNED: tl.constexpr, ZEROS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The same of words that hold adjacent columns, in groups of whole words: each is read once, and each scale once a word."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    per: tl.constexpr = 32 // BITS
    mask: tl.constexpr = (1 << BITS) - 1
    valid = (row < rows)[:, None] & (word < width)[None, :]
    held = tl.load(words + row[:, None] * w_row + word[None, :], valid, 0)
    if SIGNED:
        held = held ^ -2139062144
    member = word // group_words
    scale = tl.load(scales + row[:, None] * s_row + member[None, :], valid, 0.0).to(tl.float32)
    less = tl.full([ROWS, WORDS], 1 << (BITS - 1), tl.float32)
    if ZEROS:
        less = _zero(zeros, row, member, z_row, z_group, valid, BITS)
    within = tl.arange(0, per)[None, None, :]
    number = ((held[:, :, None] >> (within * BITS)) & mask).to(tl.float32) - less[:, :, None]
    value = (number * scale[:, :, None]).to(scales.dtype.element_ty).to(out.dtype.element_ty)
    place = row[:, None, None] * (width * per) + word[None, :, None] * per + within
    tl.store(out + place, value, valid[:, :, None])


@triton.jit
def _zero(zeros, row, member, z_row, z_group, valid, BITS: tl.constexpr):
    """[rows, words]: zero points packed along rows."""
    per: tl.constexpr = 32 // BITS
    held = tl.load(zeros + (row // per)[:, None] * z_row + member[None, :] * z_group, valid, 0)
    return ((held >> ((row % per) * BITS)[:, None]) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _one_row(
    x, words, scales, zeros, bias, out, rows, width, group_words, s_row, z_row, z_group,
    BITS: tl.constexpr, SIGNED: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Some of the products of one ``x``. Each thread holds words of several rows at the same columns, so that it reads ``x`` once for all.

    A number becomes a float without conversion: its bits, or-ed into the mantissa of 2^23, less 2^23. It stays where it lies in the word,
    so many times too large, and its ``x`` is divided by that power of two.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    per: tl.constexpr = 32 // BITS
    mask: tl.constexpr = (1 << BITS) - 1
    within: tl.constexpr = 20 // BITS
    sums = tl.zeros([ROWS, WORDS], tl.float32)
    for base in range(0, width, WORDS):
        word = base + tl.arange(0, WORDS)
        valid = (row < rows)[:, None] & (word < width)[None, :]
        held = tl.load(words + row[:, None] * width + word[None, :], valid, 0)
        if SIGNED:
            held = held ^ -2139062144
        high = (held >> (within * BITS)) & 0x7FFFFFFF
        part = tl.zeros([ROWS, WORDS], tl.float32)
        total = tl.zeros([WORDS], tl.float32)
        for i in tl.static_range(per):
            if i % 2 == 0:
                both = tl.load(x + word * (per // 2) + i // 2, word < width, 0)
            value = ((both >> (16 * (i % 2))) & 0xFFFF).to(tl.int16).to(scales.dtype.element_ty, bitcast=True).to(tl.float32)
            total += value
            if i < within:
                bits = (held & (mask << (BITS * i))) | 0x4B000000
                value = value * (1.0 / (1 << (BITS * i)))
            elif i < 2 * within:
                bits = (high & (mask << (BITS * (i - within)))) | 0x4B000000
                value = value * (1.0 / (1 << (BITS * (i - within))))
            else:
                bits = ((held >> (BITS * i)) & mask) | 0x4B000000
            part += value[None, :] * (bits.to(tl.float32, bitcast=True) - 8388608.0)
        member = word // group_words
        scale = tl.load(scales + row[:, None] * s_row + member[None, :], valid, 0.0).to(tl.float32)
        if ZEROS:
            part -= total[None, :] * _zero(zeros, row, member, z_row, z_group, valid, BITS)
        else:
            part -= total[None, :] * (1 << (BITS - 1))
        sums += part * scale
    made = tl.sum(sums, 1)
    if BIAS:
        made += tl.load(bias + row, row < rows, 0.0).to(tl.float32)
    tl.store(out + row, made.to(out.dtype.element_ty), row < rows)


@triton.jit
def _few_rows(
    x, words, scales, zeros, out, tokens, rows, width, group_words, share, s_row, z_row, z_group,
    BITS: tl.constexpr, SIGNED: tl.constexpr, ZEROS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Products of up to ``TOKENS`` x with some rows over a share of the words, in F32: out [shares, tokens, rows].

    The i-th number of each word makes a product of its own, so that decoded weights stay in the registers that held their words.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    per: tl.constexpr = 32 // BITS
    mask: tl.constexpr = (1 << BITS) - 1
    sums = tl.zeros([ROWS, TOKENS], tl.float32)
    first = tl.program_id(1) * share
    for base in range(first, tl.minimum(first + share, width), WORDS):
        word = base + tl.arange(0, WORDS)
        valid = (row < rows)[:, None] & (word < width)[None, :]
        held = tl.load(words + row[:, None] * width + word[None, :], valid, 0)
        if SIGNED:
            held = held ^ -2139062144
        member = word // group_words
        scale = tl.load(scales + row[:, None] * s_row + member[None, :], valid, 0.0).to(tl.float32)
        less = tl.full([ROWS, WORDS], 1 << (BITS - 1), tl.float32)
        if ZEROS:
            less = _zero(zeros, row, member, z_row, z_group, valid, BITS)
        for i in tl.static_range(per):
            number = ((held >> (BITS * i)) & mask).to(tl.float32)
            weight = ((number - less) * scale).to(x.dtype.element_ty)
            seen = (word < width)[:, None] & (token < tokens)[None, :]
            value = tl.load(x + token[None, :] * (width * per) + (word * per + i)[:, None], seen, 0.0)
            sums = tl.dot(weight, value, sums, input_precision="ieee")
    place = (tl.program_id(1) * tokens + token)[None, :] * rows + row[:, None]
    tl.store(out + place, sums, (row < rows)[:, None] & (token < tokens)[None, :])


@triton.jit
def _few_rows_of_any(
    x, words, scales, zeros, order, out, tokens, rows, columns, group, groups, share,
    w_row, w_column, s_row, s_group, z_row, z_group,
    BITS: tl.constexpr, ZEROS: tl.constexpr, LESS_ONE: tl.constexpr, ORDER: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """:func:`_few_rows` for words of adjacent columns in any strides: each weight loads its word, which the processor's own cache holds.
    Without ``order`` a group is a multiple of ``COLUMNS``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    per: tl.constexpr = 32 // BITS
    mask: tl.constexpr = (1 << BITS) - 1
    lane = row % per
    sums = tl.zeros([TOKENS, ROWS], tl.float32)
    first = tl.program_id(1) * share
    for base in range(first, tl.minimum(first + share, columns), COLUMNS):
        column = base + tl.arange(0, COLUMNS)
        inside = (column < columns)[:, None] & (row < rows)[None, :]
        held = tl.load(words + (column // per)[:, None] * w_column + row[None, :] * w_row, inside, 0)
        number = (held >> (column % per * BITS)[:, None]) & mask
        if ORDER:
            named = tl.load(order + column, column < columns, 0)
            member = tl.minimum(tl.where(named < 0, column // group, named), groups - 1)[:, None]
            reached = inside
        else:
            member = tl.full([1, 1], base // group, tl.int32)
            reached = (row < rows)[None, :]
        scale = tl.load(scales + row[None, :] * s_row + member * s_group, reached, 0.0).to(tl.float32)
        if ZEROS:
            zero = (tl.load(zeros + (row // per)[None, :] * z_row + member * z_group, reached, 0) >> (lane * BITS)[None, :]) & mask
            if LESS_ONE:
                zero = (zero + 1) & mask
            number = number - zero
        else:
            number = number - (1 << (BITS - 1))
        weight = (number.to(tl.float32) * scale).to(x.dtype.element_ty)
        seen = (token < tokens)[:, None] & (column < columns)[None, :]
        value = tl.load(x + token[:, None] * columns + column[None, :], seen, 0.0)
        sums = tl.dot(value, weight, sums, input_precision="ieee")
    place = (tl.program_id(1) * tokens + token)[:, None] * rows + row[None, :]
    tl.store(out + place, sums, (token < tokens)[:, None] & (row < rows)[None, :])


@triton.jit
def _merge(parts, bias, out, tokens, rows, shares, BIAS: tl.constexpr, ROWS: tl.constexpr):
    """The sum of all shares of one token."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1)
    made = tl.zeros([ROWS], tl.float32)
    for share in range(shares):
        made += tl.load(parts + (share * tokens + token) * rows + row, row < rows, 0.0)
    if BIAS:
        made += tl.load(bias + row, row < rows, 0.0).to(tl.float32)
    tl.store(out + token * rows + row, made.to(out.dtype.element_ty), row < rows)


class WholeKernels:
    """For a card with so many ``processors``, and with ``tiles`` where its tensor cores multiply BF16."""

    def __init__(self, processors: int, tiles: bool = False):
        self._decode = Launcher(_decode)
        self._decode_words = Launcher(_decode_words)
        self._few_rows = Launcher(_few_rows)
        self._few_rows_of_any = Launcher(_few_rows_of_any)
        self._merge = Launcher(_merge)
        self._one_row = Launcher(_one_row)
        self._one_row_of_fours = Launcher(one_row)
        self._processors = processors
        self.tiles = TileProducts() if tiles else None

    def decode(
        self, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None, out: torch.Tensor, *,
        bits: int, by_rows: bool = False, awq: bool = False, less_one: bool = False, signed: bool = False,
    ) -> None:  # fmt: skip
        """Decode into ``out`` [rows, columns]: bit for bit what ``whole_numbers.put`` gives.

        Views: ``words`` [rows, columns], of which one dimension is shorter as words hold several numbers of it: rows if ``by_rows``.
        ``scales`` [rows, groups], ``zeros`` [rows * bits / 32, groups], ``order``: each column's group. ``signed``: words of signed bytes
        that hold adjacent columns, in groups of whole words.
        """
        (rows, columns), groups = out.shape, scales.shape[1]
        words_are_columns = not by_rows and order is None and not less_one and words.stride(1) == scales.stride(1) == 1
        if words_are_columns and columns % groups == 0 and columns // groups % (32 // bits) == 0 and columns == words.shape[1] * 32 // bits:
            held, stride = (scales, (0, 0)) if zeros is None else (zeros, zeros.stride())
            self._decode_words((triton.cdiv(words.shape[1], 64), triton.cdiv(rows, 8)),
                words, scales, held, out, rows, words.shape[1], columns // groups * bits // 32, words.stride(0), scales.stride(0), *stride,
                BITS=bits, SIGNED=signed, ZEROS=zeros is not None, ROWS=8, WORDS=64, num_warps=4,
            )  # fmt: skip
            return
        tile, steps = (64, 64) if by_rows else (32, 128), (0, 0) if zeros is None else zeros.stride()
        self._decode((triton.cdiv(columns, tile[1]), triton.cdiv(rows, tile[0])),
            words, scales, scales if zeros is None else zeros, scales if order is None else order, out, rows, columns,
            -(-columns // groups), groups, *words.stride(), *scales.stride(), *steps,
            BITS=bits, BY_ROWS=by_rows, AWQ=awq, ZEROS=zeros is not None, LESS_ONE=less_one, ORDER=order is not None,
            ROWS=tile[0], COLUMNS=tile[1], num_warps=4,
        )  # fmt: skip

    def product(
        self, x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bias: torch.Tensor | None, *,
        bits: int, signed: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """``x`` [tokens, columns] times the matrix of ``words`` [rows, columns * bits / 32] -> [tokens, rows], up to ``MOST_TOKENS``.

        ``scales`` [rows, groups], contiguous, have the dtype of ``x``; groups are whole words; ``signed``: numbers are signed bytes. Sums
        are in F32, in an order that never changes. More than one token takes shares * tokens * rows * 4 bytes besides.
        """
        (rows, width), tokens = words.shape, len(x)
        out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
        group, zero_strides = width // scales.shape[1], (0, 0) if zeros is None else zeros.stride()
        held, added = scales if zeros is None else zeros, out if bias is None else bias
        if bits == 4 and self.tiles is not None and self.tiles.takes(x, scales, group):
            self.tiles.product(x, [(words, scales, zeros)], bias, out)
            return out
        if tokens == 1 and bits == 4 and group % 4 == 0:
            self._one_row_of_fours((triton.cdiv(rows, 4),),
                x, words, scales, held, added, out, rows, width, scales.shape[1], *zero_strides, NEAR, FAR,
                GROUP_QUADS=group // 4, ZEROS=zeros is not None, BIAS=bias is not None, QUADS=128, num_warps=2,
            )  # fmt: skip
            return out
        if tokens == 1:
            tall, wide, warps = shape_of_one(rows, width)
            self._one_row((triton.cdiv(rows, tall),),
                x.view(torch.int32), words, scales, held, added, out, rows, width, group, scales.shape[1], *zero_strides,
                BITS=bits, SIGNED=signed, ZEROS=zeros is not None, BIAS=bias is not None, ROWS=tall, WORDS=wide, num_warps=warps,
            )  # fmt: skip
            return out
        tall, wide = 64, 32
        blocks = triton.cdiv(rows, tall)
        shares = max(1, min(_SHARES_EACH * self._processors // blocks, width // (2 * wide)))
        share = triton.cdiv(triton.cdiv(width, wide), shares) * wide
        shares = triton.cdiv(width, share)
        parts = torch.empty(shares, tokens, rows, dtype=torch.float32, device=x.device)
        self._few_rows((blocks, shares),
            x, words, scales, held, parts, tokens, rows, width, group, share, scales.shape[1], *zero_strides,
            BITS=bits, SIGNED=signed, ZEROS=zeros is not None, TOKENS=MOST_TOKENS, ROWS=tall, WORDS=wide, num_warps=4,
        )  # fmt: skip
        self._merge((triton.cdiv(rows, 1024), tokens), parts, added, out, tokens, rows, shares, BIAS=bias is not None, ROWS=1024)
        return out

    def product_of_any(
        self, x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None,
        bias: torch.Tensor | None, rows: int, *, bits: int, less_one: bool = False,
    ) -> torch.Tensor | None:  # fmt: skip
        """As :meth:`product`, with the parts of :meth:`decode` whose words hold adjacent columns; None where groups are no multiples of 32
        columns, or tokens too many."""
        (tokens, columns), groups = x.shape, scales.shape[1]
        tall, wide = 64, 32
        group = -(-columns // groups)
        if tokens > MOST_TOKENS or columns % wide or (order is None and (group % wide or columns % groups)):
            return None
        out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
        blocks = triton.cdiv(rows, tall)
        shares = max(1, min(_SHARES_EACH * self._processors // blocks, columns // (8 * wide)))
        share = triton.cdiv(triton.cdiv(columns, wide), shares) * wide
        shares = triton.cdiv(columns, share)
        parts = torch.empty(shares, tokens, rows, dtype=torch.float32, device=x.device)
        steps = (0, 0) if zeros is None else zeros.stride()
        self._few_rows_of_any((blocks, shares),
            x, words, scales, scales if zeros is None else zeros, scales if order is None else order, parts, tokens, rows, columns,
            group, groups, share, *words.stride(), *scales.stride(), *steps,
            BITS=bits, ZEROS=zeros is not None, LESS_ONE=less_one, ORDER=order is not None,
            TOKENS=MOST_TOKENS, ROWS=tall, COLUMNS=wide, num_warps=4,
        )  # fmt: skip
        added = out if bias is None else bias
        self._merge((triton.cdiv(rows, 1024), tokens), parts, added, out, tokens, rows, shares, BIAS=bias is not None, ROWS=1024)
        return out


def shape_of_one(rows: int, width: int) -> tuple[int, int, int]:
    """Rows, words and warps of one program of a product with one token: the best of 90 shapes for a Llama-8B's matrices on an H100."""
    tall, most = (16, 256) if rows >= 2048 else (4, 512)
    wide = max(32, min(most, triton.next_power_of_2(width)))
    return tall, 256 if wide == 512 and width % 512 and width % 256 == 0 else wide, max(1, wide // 64 if tall == 16 else wide // 128)
