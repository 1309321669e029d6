"""MXFP4 and NVFP4 in Triton: a matrix decoded, and products of few rows with one matrix, or with several experts' at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from penstock.runtime.formats.kernels.e2m1_matrix import E2m1Matrix
from penstock.runtime.formats.kernels.launching import Launcher
from penstock.runtime.formats.kernels.places_triton import MOST_EXPERTS, PLACE, PLACES, begin_of

MOST_TOKENS = 16
"""Rows of a product that reads the stored form; with more, the matrix is decoded once for all."""
_LINE = 16
"""Bytes that a tensor's place in its expert is a multiple of."""
_VARYING = [*PLACES, "codes_at", "scales_at", "bias_at", "factor_at", "joined"]


@triton.jit
def _number(code):
    """A code of 4 bits as F32: as the uppermost bits of an F16, whose numbers are 2 ** 14 times smaller."""
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _scale(stored, E8M0: tl.constexpr):
    """A stored scale, uint8, as F32: a power of two, or E4M3."""
    wide = stored.to(tl.int32)
    if E8M0:
        bits = tl.where(wide == 0, 0x00400000, wide << 23)
        return tl.where(wide == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    bits = ((wide & 127) << 7) | ((wide & 128) << 8)
    return tl.where((wide & 127) == 127, float("nan"), bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0)


@triton.jit
def _factored(scale, factors, row, rows, joined, E8M0: tl.constexpr, DIVIDES: tl.constexpr):
    """``scale`` by the factor of its ``row``'s matrix, of ``joined`` ones."""
    if E8M0:
        return scale
    factor = tl.load(factors + row * joined // rows, row < rows, 1.0)
    return tl.div_rn(scale, factor[:, None] + scale * 0.0) if DIVIDES else scale * factor[:, None]


@triton.jit(do_not_specialize=["joined"])
def _decode(
    codes, scales, factors, out, rows, row_bytes, joined,
    GROUP: tl.constexpr, E8M0: tl.constexpr, DIVIDES: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Some rows and columns of a matrix."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    inside = (row < rows)[:, None] & (byte < row_bytes)[None, :]
    code = tl.load(codes + row[:, None] * row_bytes + byte[None, :], inside, 0).to(tl.int32)
    groups = row_bytes * 2 // GROUP
    stored = tl.load(scales + row[:, None] * groups + (byte * 2 // GROUP)[None, :], inside, 0)
    scale = _factored(_scale(stored, E8M0), factors, row, rows, joined, E8M0, DIVIDES)
    both = tl.join(_number(code & 15) * scale, _number(code >> 4) * scale)
    column = tl.program_id(1) * 2 * BYTES + tl.arange(0, 2 * BYTES)
    stays = (row < rows)[:, None] & (column < 2 * row_bytes)[None, :]
    made = tl.reshape(both, (ROWS, 2 * BYTES)).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * (2 * row_bytes) + column[None, :], made, stays)


@triton.jit(do_not_specialize=_VARYING)
def _one_row(
    memory, table, pairs, out, at0, at1, at2, at3, at4, at5, at6, at7, codes_at, scales_at, bias_at, factor_at, joined,
    rows, row_bytes, pairs_stride,
    GROUP: tl.constexpr, E8M0: tl.constexpr, DIVIDES: tl.constexpr, BIAS: tl.constexpr, BF16: tl.constexpr, TABLED: tl.constexpr,
    ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Some rows of one expert's matrix times one row of input, which comes as ``pairs`` of neighbours."""
    expert = tl.program_id(1)
    begin = begin_of(memory, table, expert, at0, at1, at2, at3, at4, at5, at6, at7, TABLED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stays = row < rows
    codes, scales = begin + codes_at * 16, begin + scales_at * 16
    groups = row_bytes * 2 // GROUP
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, row_bytes, BYTES):
        byte = first + tl.arange(0, BYTES)
        inside = stays[:, None] & (byte < row_bytes)[None, :]
        code = tl.load(codes + row[:, None] * row_bytes + byte[None, :], inside, 0).to(tl.int32)
        pair = tl.load(pairs + expert * pairs_stride + byte, byte < row_bytes, 0)
        if BF16:
            even, odd = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
        else:
            even = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            odd = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        products = _number(code & 15) * even[None, :] + _number(code >> 4) * odd[None, :]
        sums = tl.sum(tl.reshape(products, (ROWS, 2 * BYTES // GROUP, GROUP // 2)), 2)
        group = first * 2 // GROUP + tl.arange(0, 2 * BYTES // GROUP)
        known = stays[:, None] & (group < groups)[None, :]
        scale = _scale(tl.load(scales + row[:, None] * groups + group[None, :], known, 0), E8M0)
        total += tl.sum(
            sums * _factored(scale, (begin + factor_at * 16).to(tl.pointer_type(tl.float32)), row, rows, joined, E8M0, DIVIDES), 1
        )
    if BIAS:
        total += tl.load((begin + bias_at * 16).to(tl.pointer_type(out.dtype.element_ty)) + row, stays, 0.0).to(tl.float32)
    tl.store(out + expert * rows + row, total.to(out.dtype.element_ty), stays)


@triton.jit(do_not_specialize=["tokens", "joined"])
def _few_rows(
    codes, scales, factors, inputs, bias, out, tokens, joined, rows, row_bytes,
    GROUP: tl.constexpr, E8M0: tl.constexpr, DIVIDES: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Some rows of a matrix times all rows of the input. A decoded number is rounded to the input's dtype, as by ``_decode``."""
    row, token = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    stays, given = row < rows, token < tokens
    groups = row_bytes * 2 // GROUP
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for first in range(0, row_bytes, BYTES):
        byte = first + tl.arange(0, BYTES)
        here = byte < row_bytes
        inside = stays[:, None] & here[None, :]
        code = tl.load(codes + row[:, None] * row_bytes + byte[None, :], inside, 0).to(tl.int32)
        stored = tl.load(scales + row[:, None] * groups + (byte * 2 // GROUP)[None, :], inside, 0)
        scale = _factored(_scale(stored, E8M0), factors, row, rows, joined, E8M0, DIVIDES)
        place = inputs + token[:, None] * (2 * row_bytes) + 2 * byte[None, :]
        read = given[:, None] & here[None, :]
        even, odd = tl.load(place, read, 0.0), tl.load(place + 1, read, 0.0)
        total += tl.dot(even, tl.trans((_number(code & 15) * scale).to(even.dtype)), input_precision="ieee")
        total += tl.dot(odd, tl.trans((_number(code >> 4) * scale).to(odd.dtype)), input_precision="ieee")
    if BIAS:
        total += tl.load(bias + row, stays, 0.0).to(tl.float32)[None, :]
    tl.store(out + token[:, None] * rows + row[None, :], total.to(out.dtype.element_ty), given[:, None] & stays[None, :])


class E2m1Kernels:
    """Numbers of 4 bits with scales of 8. Costs nothing beside the results."""

    def __init__(self) -> None:
        self._decode = Launcher(_decode)
        self._few_rows = Launcher(_few_rows)
        self._one_row = Launcher(_one_row)

    def decode(self, matrix: E2m1Matrix, out: torch.Tensor) -> None:
        """Into ``out`` [rows, columns], contiguous: bit for bit what the CPU decodes."""
        rows, row_bytes = out.shape[0], out.shape[1] // 2
        height, width = 8, 256
        self._decode((triton.cdiv(rows, height), triton.cdiv(row_bytes, width)),
            matrix.codes, matrix.bytes_of_scales, *_factors(matrix), out, rows, row_bytes, _joined(matrix),
            GROUP=matrix.group, E8M0=matrix.factors is None, DIVIDES=matrix.divides, ROWS=height, BYTES=width, num_warps=4,
        )  # fmt: skip

    def linear(self, x: torch.Tensor, matrix: E2m1Matrix) -> torch.Tensor | None:
        """``x`` [tokens, columns] -> [tokens, rows]; None for more than ``MOST_TOKENS``, for F32, and for tensors at odd places."""
        if not 0 < len(x) <= MOST_TOKENS or x.dtype not in (torch.bfloat16, torch.float16):
            return None
        if len(x) == 1:
            return self.experts(x, [matrix])
        rows, row_bytes = 2 * matrix.codes.numel() // x.shape[1], x.shape[1] // 2
        out = x.new_empty(len(x), rows)
        bias = matrix.bias
        self._few_rows((triton.cdiv(rows, 32),),
            matrix.codes, matrix.bytes_of_scales, *_factors(matrix), x.contiguous(), out if bias is None else bias, out,
            len(x), _joined(matrix), rows, row_bytes,
            GROUP=matrix.group, E8M0=matrix.factors is None, DIVIDES=matrix.divides, BIAS=bias is not None,
            TOKENS=16, ROWS=32, BYTES=64, num_warps=4,
        )  # fmt: skip
        return out

    def experts(self, x: torch.Tensor, matrices: Sequence[E2m1Matrix]) -> torch.Tensor | None:
        """``x`` [1 or experts, columns] -> [experts, rows]: one row of input for each of ``matrices``, all alike in shapes and in how their
        tensors lie to each other, at multiples of 256 bytes from the first. None where they are not."""
        first = matrices[0]
        begin, within = first.begin, first.places
        starts = [matrix.begin - begin for matrix in matrices]
        if any(start % PLACE for start in starts) or any(place % _LINE for place in within):
            return None
        if any(matrix.places != within for matrix in matrices[1:]):
            return None
        pairs, out = x.contiguous().view(torch.int32), x.new_empty(len(matrices), 2 * first.codes.numel() // x.shape[1])
        for lot in range(0, len(matrices), MOST_EXPERTS):
            taken = [start // PLACE for start in starts[lot : lot + MOST_EXPERTS]]
            # to take a part of a tensor takes the host as long as a launch
            self._each(first, pairs[lot:] if lot and len(x) > 1 else pairs, out[lot:] if lot else out, taken, None)
        return out

    def tabled(self, x: torch.Tensor, matrix: E2m1Matrix, table: torch.Tensor) -> torch.Tensor | None:
        """The same by matrices that lie as ``matrix`` does: in units of 256 bytes they begin as far behind it as ``table`` says, int64
        [experts] on the card. None for a matrix at an odd place, and for F32."""
        if any(place % _LINE for place in matrix.places) or x.dtype not in (torch.bfloat16, torch.float16):
            return None
        out = x.new_empty(len(table), 2 * matrix.codes.numel() // x.shape[1])
        self._each(matrix, x.contiguous().view(torch.int32), out, (), table)
        return out

    def _each(self, first: E2m1Matrix, pairs: torch.Tensor, out: torch.Tensor, starts: Sequence[int], table: torch.Tensor | None) -> None:
        """Rows of input, or the same for all, times the matrices that begin at ``starts`` behind ``first``, or where ``table`` says."""
        rows, row_bytes = out.shape[1], pairs.shape[1]
        count = len(starts) if table is None else len(table)
        self._one_row((triton.cdiv(rows, 8), count),
            first.codes, out if table is None else table, pairs, out, *starts, *[0] * (MOST_EXPERTS - len(starts)),
            0, *(place // _LINE for place in first.places), _joined(first), rows, row_bytes, 0 if len(pairs) == 1 else row_bytes,
            GROUP=first.group, E8M0=first.factors is None, DIVIDES=first.divides, BIAS=first.bias is not None,
            BF16=out.dtype is torch.bfloat16, TABLED=table is not None, ROWS=8, BYTES=512, num_warps=4,
        )  # fmt: skip


def _factors(matrix: E2m1Matrix) -> tuple[torch.Tensor]:
    return (matrix.codes if matrix.factors is None else matrix.factors,)


def _joined(matrix: E2m1Matrix) -> int:
    return 1 if matrix.factors is None else matrix.factors.numel()
