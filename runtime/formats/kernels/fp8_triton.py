"""FP8 E4M3 in Triton: a matrix decoded, and products of few rows with one matrix, or with several experts' at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from penstock.runtime.formats.kernels.fp8_matrix import Fp8Matrix
from penstock.runtime.formats.kernels.launching import Launcher
from penstock.runtime.formats.kernels.places_triton import MOST_EXPERTS, PLACE, PLACES, begin_of

MOST_TOKENS = 16
"""Rows of a product that reads the stored form; with more, the matrix is decoded once for all."""
_LINE = 16
"""Bytes that a tensor's place in its expert is a multiple of."""
_VARYING = [*PLACES, "scales_at"]


@triton.jit
def _number(code, HARDWARE: tl.constexpr):
    """A stored byte as F16, exactly. Cards below 8.9 know no E4M3: as the upper bits of an F16 it is 2 ** 8 times smaller."""
    if HARDWARE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    wide = code.to(tl.int32)
    half = (((wide & 127) << 7) | ((wide & 128) << 8)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 127) == 127, float("nan"), half).to(tl.float16)


@triton.jit
def _decode(
    codes, scales, out, rows, columns, across,
    TALL: tl.constexpr, WIDE: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows and columns of a matrix; 0 is all rows, or all columns, that share a scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    number = _number(tl.load(codes + place, inside, 0), HARDWARE).to(tl.float32)
    down = row // TALL if TALL else row * 0
    right = column // WIDE if WIDE else column * 0
    scale = tl.load(scales + down[:, None] * across + right[None, :], inside, 0.0).to(tl.float32)
    tl.store(out + place, (number * scale).to(out.dtype.element_ty), inside)


@triton.jit
def _line(begin, row, columns, line, low, high, HARDWARE: tl.constexpr):
    """The products of 16 codes of ``row`` from each of ``line`` on with ``low`` and ``high``, eight numbers each, added up."""
    n: tl.constexpr = line.shape[0]
    column = line[:, None] * 16 + tl.arange(0, 16)[None, :]
    number = _number(tl.load(begin + row.to(tl.int64) * columns + column, column < columns, 0), HARDWARE).to(tl.float32)
    first, second = tl.split(tl.trans(tl.reshape(number, (n, 2, 8)), 0, 2, 1))
    return tl.sum(first * low, 1) + tl.sum(second * high, 1)


@triton.jit(do_not_specialize=_VARYING)
def _one_row(
    codes, scales, table, inputs, bias, out, at0, at1, at2, at3, at4, at5, at6, at7, scales_at, rows, columns, across, inputs_stride,
    TALL: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr, TABLED: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Four rows of one expert's matrix times one row of input. They share the scales of their blocks, and are computed one after the other:
    the input then lies where each thread needs it."""
    expert = tl.program_id(1)
    begin = begin_of(codes, table, expert, at0, at1, at2, at3, at4, at5, at6, at7, TABLED)
    known = (begin + scales_at.to(tl.int64) * 16).to(tl.pointer_type(scales.dtype.element_ty))
    first, last = tl.program_id(0) * 4, rows - 1
    row1, row2, row3 = tl.minimum(first + 1, last), tl.minimum(first + 2, last), tl.minimum(first + 3, last)
    blocks = known + (first // TALL if TALL else 0) * across
    x = inputs + expert * inputs_stride
    sum0 = tl.zeros([LINES], tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    for base in range(0, tl.cdiv(columns, 16), LINES):
        line = base + tl.arange(0, LINES)
        near = line[:, None] * 16 + tl.arange(0, 8)[None, :]
        low, high = tl.load(x + near, near < columns, 0.0).to(tl.float32), tl.load(x + near + 8, near + 8 < columns, 0.0).to(tl.float32)
        part0, part1 = _line(begin, first, columns, line, low, high, HARDWARE), _line(begin, row1, columns, line, low, high, HARDWARE)
        part2, part3 = _line(begin, row2, columns, line, low, high, HARDWARE), _line(begin, row3, columns, line, low, high, HARDWARE)
        if WIDE:
            scale = tl.load(blocks + line * 16 // WIDE, line * 16 < columns, 0.0).to(tl.float32)
            part0, part1, part2, part3 = part0 * scale, part1 * scale, part2 * scale, part3 * scale
        sum0 += part0
        sum1 += part1
        sum2 += part2
        sum3 += part3
    made = tl.sum(tl.reshape(tl.join(tl.join(sum0, sum2), tl.join(sum1, sum3)), (LINES, 4)), 0)
    row = first + tl.arange(0, 4)
    stays = row < rows
    if WIDE == 0:
        made *= tl.load(known + (row if TALL else row * 0), stays, 0.0).to(tl.float32)
    if BIAS:
        made += tl.load(bias + row, stays, 0.0).to(tl.float32)
    tl.store(out + expert * rows + row, made.to(out.dtype.element_ty), stays)


@triton.jit(do_not_specialize=["tokens"])
def _few_rows(
    codes, scales, inputs, bias, out, tokens, rows, columns, across,
    TALL: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of a matrix times all rows of the input. A stored number is exact in BF16 and in F16; sums are scaled by the block."""
    row, token = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    stays, given = row < rows, token < tokens
    line = codes + row.to(tl.int64)[:, None] * columns
    blocks = scales + (tl.program_id(0) * ROWS // TALL if TALL else 0) * across
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        here = column < columns
        number = _number(tl.load(line + column[None, :], stays[:, None] & here[None, :], 0), HARDWARE)
        read = tl.load(inputs + token[:, None] * columns + column[None, :], given[:, None] & here[None, :], 0.0)
        part = tl.dot(read, tl.trans(number.to(read.dtype)), input_precision="ieee")
        if WIDE:
            part *= tl.load(blocks + first // WIDE).to(tl.float32)
        total += part
    if WIDE == 0:
        total *= tl.load(scales + (row if TALL else row * 0), stays, 0.0).to(tl.float32)[None, :]
    if BIAS:
        total += tl.load(bias + row, stays, 0.0).to(tl.float32)[None, :]
    tl.store(out + token[:, None] * rows + row[None, :], total.to(out.dtype.element_ty), given[:, None] & stays[None, :])


class Fp8Kernels:
    """E4M3 times scales. Costs nothing beside the results. ``hardware``: whether the card converts E4M3 by itself."""

    def __init__(self, hardware: bool):
        self._decode = Launcher(_decode)
        self._few_rows = Launcher(_few_rows)
        self._one_row = Launcher(_one_row)
        self._hardware = hardware

    def decode(self, matrix: Fp8Matrix, out: torch.Tensor) -> None:
        """Into ``out`` [rows, columns], contiguous: bit for bit what the CPU decodes."""
        rows, columns = out.shape
        self._decode((triton.cdiv(rows, 8), triton.cdiv(columns, 512)),
            matrix.codes, matrix.scales, out, rows, columns, matrix.across,
            TALL=matrix.tall, WIDE=matrix.wide, HARDWARE=self._hardware, ROWS=8, COLUMNS=512, num_warps=4,
        )  # fmt: skip

    def linear(self, x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor | None:
        """``x`` [tokens, columns] -> [tokens, rows]; None for more than ``MOST_TOKENS`` and for F32."""
        if not 0 < len(x) <= MOST_TOKENS or x.dtype not in (torch.bfloat16, torch.float16):
            return None
        if len(x) == 1:
            return self._rows_of(x, [matrix], bias)
        rows, columns = matrix.codes.shape
        out = x.new_empty(len(x), rows)
        self._few_rows((triton.cdiv(rows, 32),),
            matrix.codes, matrix.scales, x.contiguous(), out if bias is None else bias, out, len(x), rows, columns, matrix.across,
            TALL=matrix.tall, WIDE=matrix.wide, BIAS=bias is not None, HARDWARE=self._hardware,
            TOKENS=16, ROWS=32, COLUMNS=128, num_warps=4,
        )  # fmt: skip
        return out

    def experts(self, x: torch.Tensor, matrices: Sequence[Fp8Matrix]) -> torch.Tensor | None:
        """``x`` [1 or experts, columns] -> [experts, rows]: one row of input for each of ``matrices``, all alike in shapes and in how their
        tensors lie to each other, at multiples of 256 bytes from the first. None for other places, and for F32."""
        return self._rows_of(x, matrices, None) if x.dtype in (torch.bfloat16, torch.float16) else None

    def _rows_of(self, x: torch.Tensor, matrices: Sequence[Fp8Matrix], bias: torch.Tensor | None) -> torch.Tensor | None:
        first = matrices[0]
        begin = first.codes.data_ptr()
        starts = [matrix.codes.data_ptr() - begin for matrix in matrices]
        scales_at = first.scales.data_ptr() - begin
        alike = all(m.scales.data_ptr() - m.codes.data_ptr() == scales_at for m in matrices)
        if any(start % PLACE for start in starts) or scales_at % _LINE or not alike:
            return None
        x = x.contiguous()
        out = x.new_empty(len(matrices), first.codes.shape[0])
        for lot in range(0, len(matrices), MOST_EXPERTS):
            taken = [start // PLACE for start in starts[lot : lot + MOST_EXPERTS]]
            self._each(first, x if len(x) == 1 else x[lot:], bias, out[lot:], taken, scales_at, None)
        return out

    def tabled(self, x: torch.Tensor, matrix: Fp8Matrix, table: torch.Tensor) -> torch.Tensor | None:
        """The same by matrices that lie as ``matrix`` does: in units of 256 bytes they begin as far behind it as ``table`` says, int64
        [experts] on the card. None for scales at an odd place, and for F32."""
        scales_at = matrix.scales.data_ptr() - matrix.codes.data_ptr()
        if scales_at % _LINE or x.dtype not in (torch.bfloat16, torch.float16):
            return None
        out = x.new_empty(len(table), matrix.codes.shape[0])
        self._each(matrix, x.contiguous(), None, out, (), scales_at, table)
        return out

    def _each(
        self, first: Fp8Matrix, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, starts: Sequence[int], scales_at: int,
        table: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Rows of input, or the same for all, times the matrices that begin at ``starts`` behind ``first``, or where ``table`` says."""
        rows, columns = first.codes.shape
        count = len(starts) if table is None else len(table)
        self._one_row((triton.cdiv(rows, 4), count),
            first.codes, first.scales, out if table is None else table, x, out if bias is None else bias, out,
            *starts, *[0] * (MOST_EXPERTS - len(starts)), scales_at // _LINE, rows, columns, first.across, 0 if len(x) == 1 else columns,
            TALL=first.tall, WIDE=first.wide, BIAS=bias is not None, HARDWARE=self._hardware, TABLED=table is not None, LINES=128,
            num_warps=4,
        )  # fmt: skip
