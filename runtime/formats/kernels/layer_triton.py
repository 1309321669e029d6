"""What lies between the products of a decoder layer, in Triton: each piece one launch where the model's own code takes several.

Every intermediate that torch rounds to the layer's dtype is rounded here, so that results are torch's to the bit. The order of a norm's sum
torch keeps to itself: ours is held to it once for each kind of norm. Where it is another, torch sums.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from penstock.runtime.formats.kernels.launching import Launcher, power_of_two

_WIDTH = 1024
_MOST_COLUMNS = 16384
"""That a norm sums in one program."""
_HALVES = (torch.bfloat16, torch.float16)
_HEADS = 8
"""That are rotated in one program."""
_THREADS = 512
"""By which torch sums rows: those of a block, which it shares out to 16 rows at most."""
_LONG = 8192
"""Columns from which on it sums in another order."""
_AT_ONCE = 8
"""Turns of these threads that are read at once, at most."""
_HELD = 16
"""Rows by which an order is held to torch's."""


def _lanes(rows: int) -> int:
    """Threads of each of so many rows."""
    return _THREADS >> min(4, rows.bit_length() - 1)


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


@triton.jit
def _in_order(
    x, more, weight, added, out, factors, columns, eps, share,
    ADD: tl.constexpr, SAY: tl.constexpr, LANES: tl.constexpr, HALVINGS: tl.constexpr,
    TURNS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One row, whose squares ``LANES`` threads sum in torch's order: each has four sums, of columns that lie side by side
    (``input_vectorized_thread_reduce_impl`` and ``block_x_reduce`` of its ATen/native/cuda/Reduce.cuh, as H100s said it in torch 2.11). To
    be compiled without fused products and sums. Columns are read so many turns at once: a store between them would have each wait."""
    row, block = tl.program_id(0).to(tl.int64) * columns, tl.arange(0, WIDE)
    if ADD:
        for at in range(BLOCKS):
            _sum_of(x + row, more + row, added + row, 0, at * WIDE + block, block < WIDE, columns, ADD)
        tl.debug_barrier()  # what other threads stored of the sum is read next
    place, sums = tl.arange(0, 4 * LANES), tl.zeros((4 * LANES,), tl.float32)
    for turns in range(TURNS // AT_ONCE):
        for turn in tl.static_range(AT_ONCE):
            wide = tl.load(added + row + (turns * AT_ONCE + turn) * 4 * LANES + place).to(tl.float32)
            sums += wide * wide
    even, odd = tl.split(tl.reshape(sums, (LANES, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    total = ((first + second) + third) + fourth
    for _ in tl.static_range(HALVINGS):  # the second half of the threads onto the first, until one is left
        total = tl.sum(tl.reshape(total, (2, total.shape[0] // 2)), 0)
    factor = tl.rsqrt(tl.sum(total, 0) * share + eps)
    if SAY:
        tl.store(factors + tl.program_id(0), factor)
    for at in range(BLOCKS):
        column = at * WIDE + block
        tl.store(out + row + column, _times(tl.load(added + row + column), factor, tl.load(weight + column)))


@triton.jit(do_not_specialize=["count"])
def _gate(gate, up, count, WHOLE: tl.constexpr, WIDE: tl.constexpr):
    """silu(gate) * up, in ``gate``. ``WHOLE``: ``count`` is a multiple of 16, so that a thread's elements are read at once."""
    if WHOLE:
        count = count // 16 * 16  # which says so to the compiler
    at = tl.program_id(0).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    here = at < count
    value, other = tl.load(gate + at, here, 0.0), tl.load(up + at, here, 0.0)
    wide = value.to(tl.float32)
    opened = tl.div_rn(wide, 1.0 + libdevice.exp(-wide)).to(value.dtype)
    tl.store(gate + at, (opened.to(tl.float32) * other.to(tl.float32)).to(value.dtype), here)


@triton.jit
def _rotate(
    query, key, cos, sin, query_out, key_out, query_heads, key_heads, q_token, q_head, k_token, k_head,
    HALF: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One token and some heads: of the queries, then of the keys. To be compiled without fused products and sums: torch rounds
    twice there."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDE)
    here = at < HALF
    turned = cos + token * (2 * HALF) + at
    cos_low, cos_high = tl.load(turned, here, 0.0).to(tl.float32)[None, :], tl.load(turned + HALF, here, 0.0).to(tl.float32)[None, :]
    turned = sin + token * (2 * HALF) + at
    sin_low, sin_high = tl.load(turned, here, 0.0).to(tl.float32)[None, :], tl.load(turned + HALF, here, 0.0).to(tl.float32)[None, :]
    of_queries = tl.cdiv(query_heads, HEADS)
    if block < of_queries:
        head = block * HEADS + tl.arange(0, HEADS)[:, None]
        within = head < query_heads
        source = query + token * q_token + head * q_head + at[None, :]
        target = query_out + (token * query_heads + head) * (2 * HALF) + at[None, :]
    else:
        head = (block - of_queries) * HEADS + tl.arange(0, HEADS)[:, None]
        within = head < key_heads
        source = key + token * k_token + head * k_head + at[None, :]
        target = key_out + (token * key_heads + head) * (2 * HALF) + at[None, :]
    within = within & here[None, :]
    low, high = tl.load(source, within, 0.0), tl.load(source + HALF, within, 0.0)
    kept_low, kept_high = (low.to(tl.float32) * cos_low).to(low.dtype), (high.to(tl.float32) * cos_high).to(low.dtype)
    moved_low, moved_high = (-high.to(tl.float32) * sin_low).to(low.dtype), (low.to(tl.float32) * sin_high).to(low.dtype)
    tl.store(target, (kept_low.to(tl.float32) + moved_low.to(tl.float32)).to(low.dtype), within)
    tl.store(target + HALF, (kept_high.to(tl.float32) + moved_high.to(tl.float32)).to(low.dtype), within)


class LayerKernels:
    """For BF16 and F16. Costs nothing beside the results, but where said."""

    def __init__(self) -> None:
        self._norm, self._squares, self._scale = Launcher(_norm), Launcher(_squares), Launcher(_scale)
        self._in_order, self._gate, self._rotate = Launcher(_in_order), Launcher(_gate), Launcher(_rotate)
        self.in_order: dict[tuple[int, int, torch.dtype], bool] = {}
        """Columns, threads of a row, dtype -> whether :meth:`norm_in_order` gives torch's bits; what has not come yet is not among them."""

    def norm(
        self, x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, eps: float, exact: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The root mean square norm of ``x`` [..., columns], to which ``more`` is added first -> the sum, and its norm. None for what is
        not contiguous or of another dtype. ``exact``: each bit is torch's. Where :meth:`norm_in_order` does not, torch sums the squares,
        for 4 bytes an element besides."""
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
        if self.norm_in_order(x, more, weight, added, out, eps):
            return added, out
        grid, squares = (rows, -(-columns // _WIDTH)), torch.empty_like(x, dtype=torch.float32)
        self._squares(grid, x, other, added, squares, columns, ADD=add, WIDE=_WIDTH)
        self._scale(grid, added, squares.mean(-1, keepdim=True), weight, out, columns, eps, WIDE=_WIDTH)
        return added, out

    def norm_in_order(
        self, x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, added: torch.Tensor, out: torch.Tensor, eps: float
    ) -> bool:
        """Whether ``out`` is the norm now, and ``added`` its sum, by one kernel whose bits are torch's. Of each kind numbers of our own are
        held to torch's factors first: what is given may be zeros, which no order tells apart. While a graph is recorded nothing can be
        held to anything: a kind that was not met before is refused then."""
        columns = weight.numel()
        rows = x.numel() // columns
        lanes = _lanes(rows)
        kind = columns, lanes, x.dtype
        if columns % (4 * lanes) or columns >= _LONG:
            return False
        if kind not in self.in_order:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return False
            self.in_order[kind] = self._sums_as_torch(x.new_empty(min(rows, _HELD), columns))
        if self.in_order[kind]:
            self._sum_in_order(x, more, weight, added, out, None, eps)
        return self.in_order[kind]

    def _sums_as_torch(self, x: torch.Tensor) -> bool:
        """Whether rows like those of ``x`` [rows, columns] are summed in torch's order. ``x`` is overwritten."""
        rows, columns = x.shape
        drawn, weight, eps = torch.Generator(x.device).manual_seed(0), x.new_ones(columns), 1e-5
        for _ in range(-(-_HELD // rows)):  # by chance, two orders agree on one row
            factors = x.new_empty(rows, 1, dtype=torch.float32)
            self._sum_in_order(x.normal_(generator=drawn), None, weight, x, torch.empty_like(x), factors, eps)
            if not torch.equal(factors, torch.rsqrt(x.float().pow_(2).mean(-1, keepdim=True) + eps)):
                return False
        return True

    def _sum_in_order(
        self,
        x: torch.Tensor,
        more: torch.Tensor | None,
        weight: torch.Tensor,
        added: torch.Tensor,
        out: torch.Tensor,
        factors: torch.Tensor | None,
        eps: float,
    ) -> None:
        """The norm, and, where they are asked for, what rows are multiplied by."""
        columns = weight.numel()
        rows = x.numel() // columns
        lanes = _lanes(rows)
        turns, wide = columns // (4 * lanes), min(columns & -columns, 32 * lanes)
        at_once = next(count for count in range(_AT_ONCE, 0, -1) if turns % count == 0)
        share = float(np.float32(rows) / np.float32(rows * columns))  # as torch has it, also where F32 does not hold the product
        told = out if factors is None else factors
        self._in_order((rows,), x, x if more is None else more, weight, added, out, told, columns, eps, share,
            ADD=more is not None, SAY=factors is not None, LANES=lanes, HALVINGS=lanes.bit_length() - 1,
            TURNS=turns, AT_ONCE=at_once, BLOCKS=columns // wide, WIDE=wide,
            num_warps=lanes // 32, enable_fp_fusion=False,
        )  # fmt: skip

    def gate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
        """silu(gate) * up, of one shape, in ``gate``'s place: a third tensor as large made the allocator ask the driver in each layer of a
        long prompt, 5 ms of an idle card. None for what is not contiguous or of another dtype."""
        if not _plain(gate, up) or gate.shape != up.shape:
            return None
        count = gate.numel()
        self._gate((-(-count // _WIDTH),), gate, up, count, WHOLE=count % 16 == 0, WIDE=_WIDTH)
        return gate

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
        self._rotate((tokens, -(-heads // _HEADS) + -(-key_heads // _HEADS)),
            query, key, cos, sin, *made, heads, key_heads, q_token, q_head, k_token, k_head,
            HALF=half, WIDE=power_of_two(half), HEADS=_HEADS, num_warps=1, enable_fp_fusion=False,
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
