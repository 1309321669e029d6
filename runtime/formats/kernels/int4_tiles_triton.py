"""The product of one token with a matrix of 4 bits by a card's tensor cores: sixteen rows of the matrix are a tile, the token its only
column. Threads take words as memory has them, and multiply without exchanging any.

A tile of PTX's ``mma.m16n8k16`` has 16 rows and 16 columns. Lane 4 g + q of a warp gives it rows g and g + 8, at four columns. Which
columns of the matrix these are does not matter where the token's numbers are taken likewise. So the lane reads 16 bytes of each of its
rows: 32 numbers, as many as it gives to 8 tiles. Numbers p and p + 4 of a word are one register of two BF16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from penstock.runtime.formats.kernels.launching import Launcher

_ROWS = 16
"""Of a tile."""
_WORDS = 16
"""Of the 128 columns that a warp multiplies by at once."""
_MOST = 3
"""Matrices of a launch."""
_TALL = 8192
"""Rows from which on programs of four warps keep a card busy."""
Matrix = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Words [rows, columns / 8], scales [rows, groups], zero points [rows / 8, groups]."""


def _assembled() -> str:
    """For one lane: four words of each of two rows, 32 numbers of the token in pairs, the two rows' zero points -> the sums of both rows
    over all columns of the warp, in each lane of a row.

    A number or-ed into the mantissa of 128 is added to it. With 128 and the zero point taken off, a BF16 holds the difference exactly.
    What another lane than the one that it was meant for computes is no number.
    """
    words, pairs, zeros, lane = [[f"${2 + 4 * row + j}" for j in range(4)] for row in (0, 1)], 10, ("$26", "$27"), "$28"
    lines = [
        ".reg .b32 held, base, one, a<4>, b<4>, x<4>;",
        ".reg .f32 c<4>;",
        ".reg .pred other;",
        "mov.b32 base, 0x43004300;",
        "mov.b32 one, 0x3F803F80;",
        *(f"mov.f32 c{i}, 0f00000000;" for i in range(4)),
    ]
    for j in range(4):
        given = [f"${pairs + 4 * j + i}" for i in range(4)]
        for p, (low, high, half) in enumerate(((0, 2, "0x5410"), (0, 2, "0x7632"), (1, 3, "0x5410"), (1, 3, "0x7632"))):
            lines.append(f"prmt.b32 x{p}, {given[low]}, {given[high]}, {half};")
        for name, row, zero in zip("ab", words, zeros, strict=True):
            for p in range(4):
                lines.append(f"shr.u32 held, {row[j]}, {4 * p};")
                lines.append(f"lop3.b32 {name}{p}, held, 0x000F000F, base, 0xEA;")
                lines.append(f"fma.rn.bf16x2 {name}{p}, {name}{p}, one, {zero};")
        for p in (0, 2):
            tile, column = f"{{a{p}, b{p}, a{p + 1}, b{p + 1}}}", f"{{x{p}, x{p + 1}}}"
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{c0, c1, c2, c3}}, {tile}, {column}, {{c0, c1, c2, c3}};")
    lines += [
        "mov.u32 held, %laneid;",
        f"setp.ne.u32 other, held, {lane};",
        "@other mov.f32 c0, 0f7FC00000;",
        "@other mov.f32 c2, 0f7FC00000;",
        "mov.f32 $0, c0;",
        "mov.f32 $1, c2;",
    ]
    return "\n".join(["{", *lines, "}"])


_ASSEMBLED = tl.constexpr(_assembled())
_OPERANDS = tl.constexpr("=f,=f," + ",".join(["r"] * 27))
_BARRIER = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")


@triton.jit
def _four(base, at):
    """Four adjacent words from each of ``at`` on."""
    n: tl.constexpr = at.shape[0]
    even, odd = tl.split(tl.reshape(tl.load(base + at[:, None] + tl.arange(0, 4)[None, :]), (n, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _less(zeros, row, group, z_row, z_group, ZEROS: tl.constexpr):
    """Twice -(128 + zero point) in BF16: of 8, the middle of all numbers, where none are stored."""
    if ZEROS:
        held = tl.load(zeros + (row // 8) * z_row + group * z_group)
        number = ((held >> (row % 8 * 4)) & 15) | 0xC300
        return number | (number << 16)
    return tl.full(row.shape, -0x3CF73CF8, tl.int32)


@triton.jit
def _chunk(words, scales, begin0, begin1, s_begin0, s_begin1, chunk, end, GROUP: tl.constexpr):
    """What a lane's two rows have of one chunk of 128 columns: four words each, and a scale each, which is 0 behind the ``end``."""
    here, chunk = chunk <= end, tl.minimum(chunk, end)
    scale0 = tl.load(scales + s_begin0 + chunk // GROUP, here, 0.0)
    scale1 = tl.load(scales + s_begin1 + chunk // GROUP, here, 0.0)
    a0, a1, a2, a3 = _four(words, begin0 + chunk * 16)
    b0, b1, b2, b3 = _four(words, begin1 + chunk * 16)
    return a0, a1, a2, a3, b0, b1, b2, b3, scale0, scale1


@triton.jit
def _products(
    x, zeros, row0, row1, chunk, end, lane, z_row, z_group, a0, a1, a2, a3, b0, b1, b2, b3, scale0, scale1,
    GROUP: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """Of these with ``x``, for both rows."""
    chunk = tl.minimum(chunk, end)
    near = chunk * 64 + (lane & 3) * 16
    x0, x1, x2, x3 = _four(x, near)
    x4, x5, x6, x7 = _four(x, near + 4)
    x8, x9, x10, x11 = _four(x, near + 8)
    x12, x13, x14, x15 = _four(x, near + 12)
    less0 = _less(zeros, row0, chunk // GROUP, z_row, z_group, ZEROS)
    less1 = _less(zeros, row1, chunk // GROUP, z_row, z_group, ZEROS)
    sum0, sum1 = tl.inline_asm_elementwise(
        _ASSEMBLED, _OPERANDS,
        [a0, a1, a2, a3, b0, b1, b2, b3, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15, less0, less1, lane],
        dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return sum0 * scale0.to(tl.float32), sum1 * scale1.to(tl.float32)


@triton.jit
def _one_of(first, second, third, begin1, begin2, row, COUNT: tl.constexpr):
    """The matrix to which ``row`` of all ``COUNT`` belongs, of which the others begin at ``begin1`` and ``begin2``."""
    found = first
    if COUNT > 1:
        found = tl.where(row >= begin1, second, found)
    if COUNT > 2:
        found = tl.where(row >= begin2, third, found)
    return found


@triton.jit
def one_row_by_tiles(
    x, words, words1, words2, scales, scales1, scales2, zeros, zeros1, zeros2, bias, out,
    begin1, begin2, rows, width, s_row, z_row, z_group,
    GROUP: tl.constexpr, COUNT: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Sixteen of the ``rows`` of up to three matrices, one below the other; where there are several, each has a multiple of sixteen. ``x``
    in pairs, as int32. Each warp takes 4 chunks of 128 columns in turn; a group has ``GROUP`` chunks.

    All words of the four are on their way before the first is multiplied: without the barrier, ptxas moves each load to where it is used.
    """
    top = tl.program_id(0) * 16
    words = _one_of(words, words1, words2, begin1, begin2, top, COUNT)
    scales = _one_of(scales, scales1, scales2, begin1, begin2, top, COUNT)
    zeros = _one_of(zeros, zeros1, zeros2, begin1, begin2, top, COUNT)
    own = top - _one_of(0, begin1, begin2, begin1, begin2, top, COUNT)
    last = own + tl.minimum(rows - top, 16) - 1
    thread = tl.arange(0, 32 * WARPS)
    lane, warp = thread & 31, thread >> 5
    quarter, end = lane & 3, width // 16 - 1
    row0, row1 = tl.minimum(own + (lane >> 2), last), tl.minimum(own + (lane >> 2) + 8, last)
    begin0, begin1 = row0 * width + quarter * 4, row1 * width + quarter * 4
    near0, near1 = row0 * s_row, row1 * s_row
    total0 = tl.zeros([32 * WARPS], tl.float32)
    total1 = total0
    for base in range(0, end + 1, 4 * WARPS):
        at = base + warp * 4
        a0, a1, a2, a3, a4, a5, a6, a7, a8, a9 = _chunk(words, scales, begin0, begin1, near0, near1, at, end, GROUP)
        b0, b1, b2, b3, b4, b5, b6, b7, b8, b9 = _chunk(words, scales, begin0, begin1, near0, near1, at + 1, end, GROUP)
        c0, c1, c2, c3, c4, c5, c6, c7, c8, c9 = _chunk(words, scales, begin0, begin1, near0, near1, at + 2, end, GROUP)
        d0, d1, d2, d3, d4, d5, d6, d7, d8, d9 = _chunk(words, scales, begin0, begin1, near0, near1, at + 3, end, GROUP)
        lane = tl.inline_asm_elementwise(_BARRIER, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)
        sum0, sum1 = _products(
            x, zeros, row0, row1, at, end, lane, z_row, z_group, a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, GROUP, ZEROS)  # fmt: skip
        sum2, sum3 = _products(
            x, zeros, row0, row1, at + 1, end, lane, z_row, z_group, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, GROUP, ZEROS)  # fmt: skip
        sum4, sum5 = _products(
            x, zeros, row0, row1, at + 2, end, lane, z_row, z_group, c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, GROUP, ZEROS)  # fmt: skip
        sum6, sum7 = _products(
            x, zeros, row0, row1, at + 3, end, lane, z_row, z_group, d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, GROUP, ZEROS)  # fmt: skip
        total0 += (sum0 + sum2) + (sum4 + sum6)
        total1 += (sum1 + sum3) + (sum5 + sum7)
    row = top + tl.arange(0, 8)
    made0, made1 = _over_warps(total0, WARPS), _over_warps(total1, WARPS)
    if BIAS:
        made0 += tl.load(bias + row, row < rows, 0.0).to(tl.float32)
        made1 += tl.load(bias + row + 8, row + 8 < rows, 0.0).to(tl.float32)
    tl.store(out + row, made0.to(out.dtype.element_ty), row < rows)
    tl.store(out + row + 8, made1.to(out.dtype.element_ty), row + 8 < rows)


@triton.jit
def _over_warps(total, WARPS: tl.constexpr):
    """[8]: all four lanes of a row have its sum."""
    return tl.sum(tl.sum(tl.reshape(total, (WARPS, 8, 4)), 0), 1) * 0.25


class TileProducts:
    """Of one token in BF16 with matrices of 4 bits. Costs nothing beside the results."""

    def __init__(self) -> None:
        self._one_row = Launcher(one_row_by_tiles)

    def takes(self, x: torch.Tensor, scales: torch.Tensor, group: int) -> bool:
        """Whether it multiplies ``x`` by matrices whose groups have so many words."""
        return len(x) == 1 and group % _WORDS == 0 and x.dtype == scales.dtype == torch.bfloat16

    def joined(self, x: torch.Tensor, matrices: Sequence[Matrix]) -> torch.Tensor | None:
        """``x`` [1, columns] times up to three matrices, of one shape but for their rows, by one launch -> [1, all rows]. None for what it
        does not take."""
        words, scales, _ = matrices[0]
        kinds = {(w.shape[1], s.shape[1], w.stride(), s.stride(), None if z is None else z.stride()) for w, s, z in matrices}
        alike = len(kinds) == 1 and not any(len(w) % _ROWS for w, _, _ in matrices) and len(matrices) <= _MOST
        if not alike or words.shape[1] % scales.shape[1] or not self.takes(x, scales, words.shape[1] // scales.shape[1]):
            return None
        out = torch.empty(1, sum(len(w) for w, _, _ in matrices), dtype=x.dtype, device=x.device)
        self.product(x, matrices, None, out)
        return out

    def product(self, x: torch.Tensor, matrices: Sequence[Matrix], bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Into ``out`` [1, all rows], of what it takes."""
        (words, scales, zeros), rows = matrices[0], out.shape[1]
        each = [*matrices, *[matrices[-1]] * (_MOST - len(matrices))]
        begins = [sum(len(w) for w, _, _ in each[: k + 1]) for k in range(_MOST - 1)]
        width, groups, steps = words.shape[1], scales.shape[1], (0, 0) if zeros is None else zeros.stride()
        warps = 4 if rows >= _TALL else 8
        self._one_row((triton.cdiv(rows, _ROWS),),
            x.view(torch.int32), *[w for w, _, _ in each], *[s for _, s, _ in each], *[s if z is None else z for _, s, z in each],
            out if bias is None else bias, out, *begins, rows, width, groups, *steps,
            GROUP=width // groups // _WORDS, COUNT=len(matrices), ZEROS=zeros is not None, BIAS=bias is not None,
            WARPS=warps, num_warps=warps,
        )  # fmt: skip
