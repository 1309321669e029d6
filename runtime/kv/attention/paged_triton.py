"""Attention over page tables in Triton: decode rows of unequal lengths, and prompts' tails whose pages are not adjacent."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.runtime.formats.kernels.launching import Launcher, power_of_two
from penstock.runtime.kv.attention.kernel_shape import KernelShape
from penstock.runtime.kv.attention.page_tables import PageTables, Traits
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape

_MOST_DIM = 512
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_VARYING = ["table_row", "window", "splits", "group", "most"]


@triton.jit(do_not_specialize=_VARYING)
def _attend(
    query, keys, values, out, parts, stats, firsts, starts, counts, ends, pages, sinks, slopes,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head,
    table_row, window, splits, group, most, scaling, softcap,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS_WIDE: tl.constexpr, VALUES_WIDE: tl.constexpr,
    LINES: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SLOPES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One row, one K head, some of its lines (a line is a token and one of the query heads of the group), some of its keys. Tokens at or
    behind the row's end are its last one.

    Keys are counted in 32 bits and pages are of a size known beforehand: to divide by another takes longer than the products.
    """
    row = tl.program_id(1)
    head, split = tl.program_id(2) // splits, tl.program_id(2) % splits
    first, start, count = tl.load(firsts + row), tl.load(starts + row).to(tl.int32), tl.load(counts + row).to(tl.int32)
    over = tl.load(ends + row).to(tl.int32)
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    if tl.program_id(0) * LINES < count * group:
        token, query_head = line // group, head * group + line % group
        valid = line < count * group
        position = tl.minimum(start + token, over - 1)
        key_dims, value_dims = tl.arange(0, KEYS_WIDE), tl.arange(0, VALUES_WIDE)
        at = (first + token) * q_token + query_head * q_head
        q = tl.load(query + at[:, None] + key_dims[None, :], valid[:, None] & (key_dims < KEY_DIM)[None, :], 0.0)
        begin = start * 0
        if WINDOW:
            begin = tl.maximum(begin, tl.minimum(start + (tl.program_id(0) * LINES) // group, over - 1) - window + 1)
        end = tl.minimum(start + (tl.program_id(0) * LINES + LINES - 1) // group + 1, over)
        share = tl.cdiv(tl.cdiv(end - begin, splits), KEYS) * KEYS
        begin += split * share
        end = tl.minimum(end, begin + share)
        highest = tl.full([LINES], -1.0e30, tl.float32)
        total = tl.zeros([LINES], tl.float32)
        sums = tl.zeros([LINES, VALUES_WIDE], tl.float32)
        slope = tl.load(slopes + query_head, valid, 0.0).to(tl.float32) if SLOPES else 0.0
        for base in range(begin, end, KEYS):
            key = base + tl.arange(0, KEYS)
            inside = key < end
            page = tl.load(pages + row * table_row + key // PAGE, inside, 0)
            slot = page * PAGE + key % PAGE
            k = tl.load(
                keys + (slot * k_token + head * k_head)[:, None] + key_dims[None, :], inside[:, None] & (key_dims < KEY_DIM)[None, :], 0.0
            )
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            if SOFTCAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            if SLOPES:
                score += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)  # type: ignore[index]
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (key[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
            higher = tl.maximum(highest, tl.max(score, 1))
            weight = tl.exp(score - higher[:, None])
            shrunk = tl.exp(highest - higher)
            total = total * shrunk + tl.sum(weight, 1)
            v = tl.load(
                values + (slot * v_token + head * v_head)[:, None] + value_dims[None, :],
                inside[:, None] & (value_dims < VALUE_DIM)[None, :],
                0.0,
            )
            sums = sums * shrunk[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            highest = higher
        stored = valid[:, None] & (value_dims < VALUE_DIM)[None, :]
        if WHOLE:
            if SINKS:
                sink = tl.load(sinks + query_head, valid, 0.0).to(tl.float32)
                higher = tl.maximum(highest, sink)
                total = total * tl.exp(highest - higher) + tl.exp(sink - higher)
                sums = sums * tl.exp(highest - higher)[:, None]
            made = sums / total[:, None]
            place = (first + token) * o_token + query_head * o_head
            tl.store(out + place[:, None] + value_dims[None, :], made.to(out.dtype.element_ty), stored)
        else:
            heads = group * (tl.num_programs(2) // splits)
            place = ((row * most + token) * heads + query_head) * splits + split
            tl.store(parts + place[:, None] * VALUE_DIM + value_dims[None, :], sums, stored)
            tl.store(stats + place * 2, highest, valid)
            tl.store(stats + place * 2 + 1, total, valid)


@triton.jit(do_not_specialize=["splits", "most_tokens"])
def _merge(
    parts, stats, out, firsts, counts, sinks, splits, heads, most_tokens, o_token, o_head,
    VALUE_DIM: tl.constexpr, VALUES_WIDE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One token of a row and one query head: its splits' sums as one."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.program_id(2) < tl.load(counts + row):
        token = tl.load(firsts + row) + tl.program_id(2)
        dims = tl.arange(0, VALUES_WIDE)
        inside = dims < VALUE_DIM
        place = ((row * most_tokens + tl.program_id(2)) * heads + head) * splits
        most, total = token * 0.0 - 1.0e30, token * 0.0
        sums = tl.zeros([VALUES_WIDE], tl.float32)
        for split in range(splits):
            here = tl.load(stats + (place + split) * 2)
            higher = tl.maximum(most, here)
            weight = tl.exp(here - higher)
            shrunk = tl.exp(most - higher)
            total = total * shrunk + tl.load(stats + (place + split) * 2 + 1) * weight
            sums = sums * shrunk + tl.load(parts + (place + split) * VALUE_DIM + dims, inside, 0.0) * weight
            most = higher
        if SINKS:
            sink = tl.load(sinks + head).to(tl.float32)
            higher = tl.maximum(most, sink)
            sums = sums * tl.exp(most - higher)
            total = total * tl.exp(most - higher) + tl.exp(sink - higher)
        tl.store(out + token * o_token + head * o_head + dims, (sums / total).to(out.dtype.element_ty), inside)


@triton.jit
def _write(
    new_keys, new_values, keys, values, slots, nk_head, nk_token, nv_head, nv_token, k_token, k_head, v_token, v_head,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS_WIDE: tl.constexpr, VALUES_WIDE: tl.constexpr,
):  # fmt: skip
    """One token and one K head: its K and V to the token's place in the pool."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    dim = tl.arange(0, KEYS_WIDE)
    given = tl.load(new_keys + token * nk_token + head * nk_head + dim, dim < KEY_DIM, 0.0)
    tl.store(keys + slot * k_token + head * k_head + dim, given, dim < KEY_DIM)
    dim = tl.arange(0, VALUES_WIDE)
    given = tl.load(new_values + token * nv_token + head * nv_head + dim, dim < VALUE_DIM, 0.0)
    tl.store(values + slot * v_token + head * v_head + dim, given, dim < VALUE_DIM)


class TritonKernel:
    """For a card with so many ``processors``. A row's keys are split among several programs where rows and heads are fewer than those.

    Costs, where keys are split: 2 * processors * 64 * (dim + 2) * 4 bytes at most, some 9 MB; other rows of the pass cost nothing.
    """

    alone = False
    """FlashAttention is as fast with one row."""

    def __init__(self, processors: int):
        self._processors = processors
        self._attend, self._merge, self._write = Launcher(_attend), Launcher(_merge), Launcher(_write)

    def takes(self, query: torch.Tensor, shape: TokenShape) -> bool:
        (heads, dim), (value_heads, value_dim) = shape.keys, shape.values
        alike = query.dtype == shape.dtype and heads == value_heads and query.shape[1] % heads == 0
        return alike and shape.dtype in _DTYPES and max(dim, value_dim) <= _MOST_DIM

    def attend(self, query: torch.Tensor, held: Pair, tables: PageTables, traits: Traits, out: torch.Tensor) -> None:
        keys, values = held
        rows, heads, dim, value_dim = len(tables.counts), keys.shape[1], keys.shape[2], values.shape[2]
        group = query.shape[1] // heads
        shape = KernelShape.of(tables, heads, group, (dim, value_dim), traits.window, self._processors)
        splits = shape.splits
        parts = stats = out
        if splits > 1:
            sums = shape.partial_sums(rows, tables.most_tokens, query.shape[1])
            parts, stats = (torch.empty(sums * each, dtype=torch.float32, device=query.device) for each in (value_dim, 2))
        sinks, slopes = (out if given is None else given for given in (traits.sinks, traits.slopes))
        self._attend((shape.blocks, rows, heads * splits),
            query, keys, values, out, parts, stats, tables.firsts, tables.starts, tables.counts, tables.ends,
            tables.pages, sinks, slopes,
            *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], *out.stride()[:2],
            tables.pages.stride(0), traits.window or 0, splits, group, tables.most_tokens, traits.scaling, traits.softcap or 0.0,
            KEY_DIM=dim, VALUE_DIM=value_dim, KEYS_WIDE=shape.wide, VALUES_WIDE=shape.value_wide, LINES=shape.lines, KEYS=shape.keys,
            PAGE=tables.page_tokens,
            WINDOW=traits.window is not None, SOFTCAP=traits.softcap is not None, SINKS=traits.sinks is not None,
            SLOPES=traits.slopes is not None, WHOLE=shape.whole, num_warps=4, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            self._merge((rows, query.shape[1], tables.most_tokens),
                parts, stats, out, tables.firsts, tables.counts, sinks, splits, query.shape[1], tables.most_tokens,
                *out.stride()[:2],
                VALUE_DIM=value_dim, VALUES_WIDE=shape.value_wide, SINKS=traits.sinks is not None,
            )  # fmt: skip

    def write(self, held: Pair, new: Pair, slots: torch.Tensor) -> bool:
        (keys, values), (new_keys, new_values) = held, new
        (_, heads, tokens, dim), value_dim = new_keys.shape, new_values.shape[3]
        alike = keys.dtype == values.dtype == new_keys.dtype == new_values.dtype and new_values.shape[1] == heads
        if not alike or any(one.stride(-1) != 1 for one in (*held, *new)):
            return False
        self._write((tokens, heads),
            new_keys, new_values, keys, values, slots, *new_keys.stride()[1:3], *new_values.stride()[1:3],
            *keys.stride()[:2], *values.stride()[:2], KEY_DIM=dim, VALUE_DIM=value_dim,
            KEYS_WIDE=power_of_two(dim), VALUES_WIDE=power_of_two(value_dim), num_warps=1,
        )  # fmt: skip
        return True
