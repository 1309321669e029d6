"""Blocks of GGUF files in Triton: a matrix decoded, and products of few rows with one that stays coded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.runtime.formats.kernels.launching import Launcher

MOST_TOKENS = 16
"""Rows of a product that reads the stored form; with more, the matrix is decoded once for all."""
_KINDS = {"Q4_0": 0, "Q8_0": 1, "Q4_K": 2, "Q5_K": 3, "Q6_K": 4}
_WITH_MINIMA = ("Q4_K", "Q5_K")
"""Whose product of one row an H100 got wrong by Triton 3.6, though the same tile is right in the two other kernels."""
_BYTES = {"Q4_0": 18, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
"""Of one block."""


@triton.jit
def _half(row, at, inside):
    """The F16 number at the even offset ``at`` from each ``row``."""
    return tl.load((row + at).to(tl.pointer_type(tl.float16)), inside, 0.0).to(tl.float32)


@triton.jit
def _group_of_six(row, at, group, inside):
    """Scale and minimum of 6 bits of each ``group`` of eight, from the 12 bytes at ``at``."""
    place = row + at
    low = tl.load(place + group % 4, inside, 0).to(tl.int32)
    middle = tl.load(place + 4 + group % 4, inside, 0).to(tl.int32)
    high = tl.load(place + 8 + group % 4, inside, 0).to(tl.int32)
    first = group < 4
    scale = tl.where(first, low & 63, (high & 15) | ((low >> 2) & 48))
    minimum = tl.where(first, middle & 63, (high >> 4) | ((middle >> 2) & 48))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _tile(weight, row, inside, base, row_bytes, groups, KIND: tl.constexpr):
    """256 columns from 256 * ``base`` on of each ``row``, as eight groups of 32: F32 [rows, 8, 32]. What lies beyond is 0."""
    group, within = tl.arange(0, 8)[None, :], tl.arange(0, 32)[None, None, :]
    start = weight + row[:, None] * row_bytes
    here = inside[:, None] & (base * 8 + group < groups)
    wide = group[:, :, None]
    known = here[:, :, None] & (within < 32)
    if KIND < 2:
        block = start + (base * 8 + group) * (18 if KIND == 0 else 34)
        scale = _half(block, 0, here)[:, :, None]
        if KIND == 0:
            byte = tl.load(block[:, :, None] + 2 + within % 16, known, 0).to(tl.int32)
            values = (((byte >> (within // 16 * 4)) & 15) - 8).to(tl.float32) * scale
        else:
            byte = tl.load(block[:, :, None] + 2 + within, known, 0).to(tl.int32)
            values = (byte - ((byte & 128) << 1)).to(tl.float32) * scale
    elif KIND == 4:
        block = start + base * 210 + group * 0
        low = tl.load(block[:, :, None] + wide // 4 * 64 + wide % 2 * 32 + within, known, 0).to(tl.int32)
        high = tl.load(block[:, :, None] + 128 + wide // 4 * 32 + within, known, 0).to(tl.int32)
        code = ((low >> (wide % 4 // 2 * 4)) & 15) | (((high >> (wide % 4 * 2)) & 3) << 4)
        small = tl.load(block[:, :, None] + 192 + wide * 2 + within // 16, known, 0).to(tl.int32)
        scale = (small - ((small & 128) << 1)).to(tl.float32) * _half(block, 208, here)[:, :, None]
        values = (code - 32).to(tl.float32) * scale
    else:
        block = start + base * (144 if KIND == 2 else 176) + group * 0
        byte = tl.load(block[:, :, None] + (16 if KIND == 2 else 48) + wide // 2 * 32 + within, known, 0).to(tl.int32)
        code = (byte >> (wide % 2 * 4)) & 15
        if KIND == 3:
            fifth = tl.load(block[:, :, None] + 16 + within + wide * 0, known, 0).to(tl.int32)
            code |= ((fifth >> wide) & 1) << 4
        scale, minimum = _group_of_six(block, 4, group, here)
        scale *= _half(block, 0, here)
        minimum *= _half(block, 2, here)
        values = code.to(tl.float32) * scale[:, :, None] - minimum[:, :, None]
    return values


@triton.jit
def _decode(weight, out, rows, row_bytes, columns, KIND: tl.constexpr, ROWS: tl.constexpr):
    """256 columns of some rows."""
    row, base = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    values = _tile(weight, row, row < rows, base, row_bytes, columns // 32, KIND)
    column = base * 256 + tl.arange(0, 8)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    stays = (row < rows)[:, None, None] & (column < columns)
    tl.store(out + row[:, None, None] * columns + column, values.to(out.dtype.element_ty), stays)


@triton.jit
def _one_row(weight, x, bias, out, rows, row_bytes, columns, KIND: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr):
    """Some rows of a matrix times one row of input."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, 8, 32], tl.float32)
    for base in range(0, tl.cdiv(columns, 256)):
        column = base * 256 + tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :]
        given = tl.load(x + column, column < columns, 0.0).to(tl.float32)
        total += _tile(weight, row, row < rows, base, row_bytes, columns // 32, KIND) * given[None, :, :]
    found = tl.sum(tl.reshape(total, (ROWS, 256)), 1)
    if BIAS:
        found += tl.load(bias + row, row < rows, 0.0).to(tl.float32)
    tl.store(out + row, found.to(out.dtype.element_ty), row < rows)


@triton.jit(do_not_specialize=["tokens"])
def _few_rows(
    weight, x, bias, out, tokens, rows, row_bytes, columns,
    KIND: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Some rows of a matrix times all rows of the input. Decoded values are rounded to the input's type, as by ``_decode``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for base in range(0, tl.cdiv(columns, 256)):
        column = base * 256 + tl.arange(0, 256)
        read = (token < tokens)[:, None] & (column < columns)[None, :]
        given = tl.load(x + token[:, None] * columns + column[None, :], read, 0.0)
        values = tl.reshape(_tile(weight, row, row < rows, base, row_bytes, columns // 32, KIND), (ROWS, 256))
        total += tl.dot(given, tl.trans(values.to(given.dtype)), input_precision="ieee")
    if BIAS:
        total += tl.load(bias + row, row < rows, 0.0).to(tl.float32)[None, :]
    stays = (token < tokens)[:, None] & (row < rows)[None, :]
    tl.store(out + token[:, None] * rows + row[None, :], total.to(out.dtype.element_ty), stays)


class GgufKernels:
    """Blocks of GGUF files. Costs nothing beside the results."""

    def __init__(self) -> None:
        self._decode, self._few_rows, self._one_row = Launcher(_decode), Launcher(_few_rows), Launcher(_one_row)

    def decode(self, kind: str, weight: torch.Tensor, out: torch.Tensor) -> None:
        """``weight`` uint8 [rows, bytes of a row] in blocks of ``kind`` into ``out`` [rows, columns], contiguous, to the CPU's bits."""
        rows, columns = out.shape
        height = 8
        self._decode((triton.cdiv(rows, height), triton.cdiv(columns, 256)),
            weight, out, rows, _row_bytes(kind, columns), columns, KIND=_KINDS[kind], ROWS=height, enable_fp_fusion=False,
        )  # fmt: skip

    def multiply(self, kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """``x`` [tokens, columns] -> [tokens, rows]; None for more than ``MOST_TOKENS``."""
        tokens, columns = x.shape
        if not 0 < tokens <= MOST_TOKENS or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return None
        row_bytes = _row_bytes(kind, columns)
        rows = weight.numel() // row_bytes
        out, x = x.new_empty(tokens, rows), x.contiguous()
        given = (weight, x, out if bias is None else bias, out)
        sizes, known = (rows, row_bytes, columns), {"KIND": _KINDS[kind], "BIAS": bias is not None}
        if tokens == 1 and kind not in _WITH_MINIMA:
            self._one_row((triton.cdiv(rows, 4),), *given, *sizes, **known, ROWS=4)
        else:
            self._few_rows((triton.cdiv(rows, 32),), *given, tokens, *sizes, **known, ROWS=32, TOKENS=16)
        return out


def _row_bytes(kind: str, columns: int) -> int:
    return columns // (32 if _KINDS[kind] < 2 else 256) * _BYTES[kind]
