"""Attention over page tables on the CPU, in C: rows of few tokens, whose keys are read once and where they lie."""

from __future__ import annotations

import torch

from penstock.runtime.beside.host_library import CAttend
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.kv.attention.page_tables import PageTables, Traits
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape

LANES, MOST_DIM = 16, 512
"""Of attend.c: a head's dimension is a multiple of the one, and at most the other."""


class HostKernel:
    """Attention by ``pool``. Sums, weights included, are F32, where torch's kernel rounds weights to BF16. Its memory: 4 bytes for each
    token, query head, dimension of V, and 256 keys."""

    alone = True
    """torch's kernel makes products of one row each: 0.7 to 2.7 ms for 12 heads and 530 keys on two cores, where this takes 0.1."""

    def __init__(self, pool: HostPool):
        self._pool = pool

    def takes(self, query: torch.Tensor, shape: TokenShape) -> bool:
        (heads, key_dim), (value_heads, value_dim) = shape.keys, shape.values
        fitting = all(dim % LANES == 0 and dim <= MOST_DIM for dim in (key_dim, value_dim))
        plain = query.dtype == shape.dtype == torch.bfloat16 and query.stride(2) == 1
        return plain and fitting and heads == value_heads and query.shape[1] % heads == 0

    def attend(self, query: torch.Tensor, held: Pair, tables: PageTables, traits: Traits, out: torch.Tensor) -> None:
        self._pool.attend(self.asked(query, held, tables, traits, out))

    def asked(self, query: torch.Tensor, held: Pair, tables: PageTables, traits: Traits, out: torch.Tensor) -> CAttend:
        """What :meth:`attend` asks the pool for; its tensors are the caller's to keep."""
        keys, values = held
        sinks, slopes = (None if part is None else part.float().contiguous() for part in (traits.sinks, traits.slopes))
        parts = (query, keys, values, out, tables.firsts, tables.starts, tables.counts, tables.pages, sinks, slopes)
        sizes = (len(tables.firsts), query.shape[1], *keys.shape[1:], values.shape[2])
        steps = (step for states in (query, keys, values, out) for step in states.stride()[:2])
        at = (tables.pages.stride(0), tables.page_tokens, traits.window or 0, tables.most_keys)
        addresses = (None if part is None else part.data_ptr() for part in parts)
        return CAttend(*addresses, *sizes, *steps, *at, traits.scaling, traits.softcap or 0.0)

    def write(self, held: Pair, new: Pair, slots: torch.Tensor) -> bool:
        """False: torch copies them."""
        return False
