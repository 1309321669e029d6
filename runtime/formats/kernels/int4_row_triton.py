"""The product of one token with a matrix of 4 bits: words in fours, rows one after the other, so that no layout has to be changed."""

from __future__ import annotations

import triton
import triton.language as tl

NEAR, FAR = 0x43000000, 0x45000000
"""2^7 and 2^11 as F32. A number or-ed into their mantissa at bit 16 or 12 is added to them. Given at run time: as constants, compilers
spend a second instruction on each."""


@triton.jit
def _eight(x, at, here):
    """Eight neighbours from each of ``at`` on, in F32."""
    n: tl.constexpr = at.shape[0]
    given = tl.load(x + at[:, None] + tl.arange(0, 8)[None, :], here[:, None], 0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(given, (n, 4, 2)))
    even_low, even_high = tl.split(tl.reshape(even, (n, 2, 2)))
    odd_low, odd_high = tl.split(tl.reshape(odd, (n, 2, 2)))
    x0, x4 = tl.split(even_low)
    x2, x6 = tl.split(even_high)
    x1, x5 = tl.split(odd_low)
    x3, x7 = tl.split(odd_high)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _four(words, row, width, quad, here):
    """Four adjacent words of ``row`` from each of ``quad`` on."""
    n: tl.constexpr = quad.shape[0]
    held = tl.load(words + row.to(tl.int64) * width + quad[:, None] * 4 + tl.arange(0, 4)[None, :], here[:, None], 0)
    even, odd = tl.split(tl.reshape(held, (n, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _float(bits, base):
    return (bits | base).to(tl.float32, bitcast=True)


@triton.jit
def _word(part, held, near, far, x0, x1, x2, x3, x4, x5, x6, x7):
    """``part`` and the products of one word's numbers, each with 2^7 (1, 2, 4, 5, 7) or 2^11 (0, 3, 6) added."""
    low, high = held << 12, held >> 12
    part += x3 * _float(held & 0x0000F000, far)
    part += x4 * _float(held & 0x000F0000, near)
    part += x0 * _float(low & 0x0000F000, far)
    part += x1 * _float(low & 0x000F0000, near)
    part += x2 * _float((held << 8) & 0x000F0000, near)
    part += x5 * _float((held >> 4) & 0x000F0000, near)
    part += x6 * _float(high & 0x0000F000, far)
    part += x7 * _float(high & 0x000F0000, near)
    return part


@triton.jit
def _zero(zeros, row, group, z_row, z_group, here, ZEROS: tl.constexpr):
    """Of each group: the middle of all numbers where none are stored."""
    if ZEROS:
        held = tl.load(zeros + (row // 8) * z_row + group * z_group, here, 0)
        return ((held >> (row % 8 * 4)) & 15).to(tl.float32)
    return tl.full(group.shape, 8.0, tl.float32)


@triton.jit
def _scale(scales, row, group, s_row, here):
    return tl.load(scales + row * s_row + group, here, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["near", "far"])
def one_row(
    x, words, scales, zeros, bias, out, rows, width, s_row, z_row, z_group, near, far,
    GROUP_QUADS: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Four rows. A group has ``GROUP_QUADS`` times four words."""
    first = tl.program_id(0) * 4
    last = rows - 1
    row1, row2, row3 = tl.minimum(first + 1, last), tl.minimum(first + 2, last), tl.minimum(first + 3, last)
    sum0 = tl.zeros([QUADS], tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    for base in range(0, width // 4, QUADS):
        quad = base + tl.arange(0, QUADS)
        here = quad < width // 4
        a0, a1, a2, a3 = _four(words, first, width, quad, here)
        b0, b1, b2, b3 = _four(words, row1, width, quad, here)
        c0, c1, c2, c3 = _four(words, row2, width, quad, here)
        d0, d1, d2, d3 = _four(words, row3, width, quad, here)
        group = quad // GROUP_QUADS
        scale0, scale1 = _scale(scales, first, group, s_row, here), _scale(scales, row1, group, s_row, here)
        scale2, scale3 = _scale(scales, row2, group, s_row, here), _scale(scales, row3, group, s_row, here)
        zero0, zero1 = _zero(zeros, first, group, z_row, z_group, here, ZEROS), _zero(zeros, row1, group, z_row, z_group, here, ZEROS)
        zero2, zero3 = _zero(zeros, row2, group, z_row, z_group, here, ZEROS), _zero(zeros, row3, group, z_row, z_group, here, ZEROS)
        part0 = tl.zeros([QUADS], tl.float32)
        part1, part2, part3, seen_near, seen_far = part0, part0, part0, part0, part0
        for j in tl.static_range(4):
            x0, x1, x2, x3, x4, x5, x6, x7 = _eight(x, quad * 32 + 8 * j, here)
            seen_near += (x1 + x2) + (x4 + x5) + x7
            seen_far += (x0 + x3) + x6
            part0 = _word(part0, a0 if j == 0 else (a1 if j == 1 else (a2 if j == 2 else a3)), near, far, x0, x1, x2, x3, x4, x5, x6, x7)
            part1 = _word(part1, b0 if j == 0 else (b1 if j == 1 else (b2 if j == 2 else b3)), near, far, x0, x1, x2, x3, x4, x5, x6, x7)
            part2 = _word(part2, c0 if j == 0 else (c1 if j == 1 else (c2 if j == 2 else c3)), near, far, x0, x1, x2, x3, x4, x5, x6, x7)
            part3 = _word(part3, d0 if j == 0 else (d1 if j == 1 else (d2 if j == 2 else d3)), near, far, x0, x1, x2, x3, x4, x5, x6, x7)
        total, seen = seen_near * 128.0 + seen_far * 2048.0, seen_near + seen_far
        sum0 += (part0 - total - seen * zero0) * scale0
        sum1 += (part1 - total - seen * zero1) * scale1
        sum2 += (part2 - total - seen * zero2) * scale2
        sum3 += (part3 - total - seen * zero3) * scale3
    made = tl.sum(tl.reshape(tl.join(tl.join(sum0, sum2), tl.join(sum1, sum3)), (QUADS, 4)), 0)
    row = first + tl.arange(0, 4)
    if BIAS:
        made += tl.load(bias + row, row < rows, 0.0).to(tl.float32)
    tl.store(out + row, made.to(out.dtype.element_ty), row < rows)
