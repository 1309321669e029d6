"""What lies between the products of a decoder layer, in Triton: each piece one launch where the model's own code takes several.

Every intermediate that torch rounds to the layer's dtype is rounded here, so that results are torch's to the bit. The one exception is
the order of a norm's sum, which torch keeps to itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from penstock.runtime.formats.kernels.launching import Launcher, power_of_two

_WIDTH = 1024
_MOST_COLUMNS = 16384
"""That a norm sums in one program."""
_HALVES = (torch.bfloat16, torch.float16)


@triton.jit
def _sum_of(x, more, added, row, column, here, columns, ADD: tl.constexpr):
    """``x``, or ``x`` + ``more``, which is stored as ``added``."""
    value = tl.load(x + row * columns + column, here, 0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(more + row * columns + column, here, 0.0).to(tl.float32)).to(value.dtype)
        tl.store(added + row * columns + column, value, here)
    return value


@triton.jit
def _times(value, factor, weight):
    """``weight * (value * factor)``, of which the inner product is rounded."""
    made = (value.to(tl.float32) * factor).to(value.dtype)
    return (weight.to(tl.float32) * made.to(tl.float32)).to(value.dtype)


@triton.jit
def _norm(x, more, weight, added, out, columns, eps, ADD: tl.constexpr, WIDE: tl.constexpr):
    """One row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    here = column < columns
    known = tl.load(weight + column, here, 0.0)
    value = _sum_of(x, more, added, row, column, here, columns, ADD)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    tl.store(out + row * columns + column, _times(value, factor, known), here)


@triton.jit
def _squares(x, more, added, out, columns, ADD: tl.constexpr, WIDE: tl.constexpr):
    """Some columns of one row, in F32."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    here = column < columns
    wide = _sum_of(x, more, added, row, column, here, columns, ADD).to(tl.float32)
    tl.store(out + row * columns + column, wide * wide, here)


@triton.jit
def _scale(x, means, weight, out, columns, eps, WIDE: tl.constexpr):
    """Some columns of one row whose mean square is known."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    here = column < columns
    value, known = tl.load(x + row * columns + column, here, 0.0), tl.load(weight + column, here, 0.0)
    tl.store(out + row * columns + column, _times(value, tl.rsqrt(tl.load(means + row) + eps), known), here)


@triton.jit(do_not_specialize=["count"])
def _gate(gate, up, out, count, WIDE: tl.constexpr):
    """silu(gate) * up."""
    at = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    here = at < count
    value, other = tl.load(gate + at, here, 0.0), tl.load(up + at, here, 0.0)
    wide = value.to(tl.float32)
    opened = tl.div_rn(wide, 1.0 + libdevice.exp(-wide)).to(value.dtype)
    tl.store(out + at, (opened.to(tl.float32) * other.to(tl.float32)).to(value.dtype), here)


@triton.jit
def _rotate(
    query, key, cos, sin, query_out, key_out, query_heads, key_heads, q_token, q_head, k_token, k_head,
    HALF: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One token and one head: of the queries, then of the keys. To be compiled without fused products and sums: torch rounds
    twice there."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    here = at < HALF
    turned = cos + token * (2 * HALF) + at
    cos_low, cos_high = tl.load(turned, here, 0.0).to(tl.float32), tl.load(turned + HALF, here, 0.0).to(tl.float32)
    turned = sin + token * (2 * HALF) + at
    sin_low, sin_high = tl.load(turned, here, 0.0).to(tl.float32), tl.load(turned + HALF, here, 0.0).to(tl.float32)
    if head < query_heads:
        source = query + token * q_token + head * q_head + at
        target = query_out + (token * query_heads + head) * (2 * HALF) + at
    else:
        source = key + token * k_token + (head - query_heads) * k_head + at
        target = key_out + (token * key_heads + head - query_heads) * (2 * HALF) + at
    low, high = tl.load(source, here, 0.0), tl.load(source + HALF, here, 0.0)
    kept_low, kept_high = (low.to(tl.float32) * cos_low).to(low.dtype), (high.to(tl.float32) * cos_high).to(low.dtype)
    moved_low, moved_high = (-high.to(tl.float32) * sin_low).to(low.dtype), (low.to(tl.float32) * sin_high).to(low.dtype)
    tl.store(target, (kept_low.to(tl.float32) + moved_low.to(tl.float32)).to(low.dtype), here)
    tl.store(target + HALF, (kept_high.to(tl.float32) + moved_high.to(tl.float32)).to(low.dtype), here)


class LayerKernels:
    """For BF16 and F16. Costs nothing beside the results, but where said."""

    def __init__(self) -> None:
        self._norm, self._squares, self._scale = Launcher(_norm), Launcher(_squares), Launcher(_scale)
        self._gate, self._rotate = Launcher(_gate), Launcher(_rotate)

    def norm(
        self, x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float, exact: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The root mean square norm of ``x`` [..., columns], to which ``more`` is added first -> the sum, and its norm. None for what is
        not contiguous or of another dtype. ``exact``: torch sums the squares, and each bit is torch's, for 4 bytes an element besides."""
        columns = weight.numel()
        if columns != x.shape[-1] or columns > _MOST_COLUMNS or not _plain(x, more, weight):
            return None
        rows, out, added = x.numel() // columns, torch.empty_like(x), x if more is None else torch.empty_like(x)
        other, add = x if more is None else more, more is not None
        if not exact:
            wide = power_of_two(columns)
            warps = max(1, min(16, wide // 512))
            self._norm((rows,), x, other, weight, added, out, columns, eps, ADD=add, WIDE=wide, num_warps=warps)
            return added, out
        blocks, squares = -(-columns // _WIDTH), torch.empty_like(x, dtype=torch.float32)
        self._squares((rows, blocks), x, other, added, squares, columns, ADD=add, WIDE=_WIDTH)
        self._scale((rows, blocks), added, squares.mean(-1, keepdim=True), weight, out, columns, eps, WIDE=_WIDTH)
        return added, out

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
        """silu(gate) * up, of one shape; None for what is not contiguous or of another dtype."""
        if not _plain(gate, up) or gate.shape != up.shape:
            return None
        out, count = torch.empty_like(gate), gate.numel()
        self._gate((-(-count // _WIDTH),), gate, up, out, count, WIDE=_WIDTH)
        return out

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rotary positions of queries and keys [1, heads, tokens, dim] by ``cos`` and ``sin`` [1, tokens, dim]; None for other shapes."""
        (rows, heads, tokens, dim), key_heads = query.shape, key.shape[1]
        alike = rows == 1 and key.shape == (1, key_heads, tokens, dim) and cos.shape == sin.shape == (1, tokens, dim) and dim % 2 == 0
        (_, q_head, q_token, q_last), (_, k_head, k_token, k_last) = query.stride(), key.stride()
        same = query.dtype == key.dtype == cos.dtype and query.device == cos.device
        if not alike or not same or not _plain(cos, sin) or q_last != 1 or k_last != 1:
            return None
        made, half = (query.new_empty(1, tokens, heads, dim), key.new_empty(1, tokens, key_heads, dim)), dim // 2
        self._rotate((tokens, heads + key_heads),
            query, key, cos, sin, *made, heads, key_heads, q_token, q_head, k_token, k_head,
            HALF=half, WIDE=power_of_two(half), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        return made[0].transpose(1, 2), made[1].transpose(1, 2)


def _plain(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether all are contiguous, in one dtype of 16 bits, on one device; as many questions as there must be, at each launch."""
    dtype, device = first.dtype, first.device
    if dtype not in _HALVES or not first.is_contiguous() or not first.numel():
        return False
    for one in others:
        if one is not None and (one.dtype is not dtype or one.device != device or not one.is_contiguous() or not one.numel()):
            return False
    return True
