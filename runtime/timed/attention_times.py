"""Attention of the CPU over K and V that lie in DRAM: its rate alone, and what it and copies to a card leave each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import torch

from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.kv.attention.page_tables import PageTables, Traits
from penstock.runtime.kv.attention.paged_host import HostKernel
from penstock.runtime.kv.batch.token_shape import Pair
from penstock.runtime.timed.copies import Copying

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
ATTENDED = 16, 8192
"""Sequences, and tokens of each, whose attention is timed."""
LEAST = 3
"""Layers that are attended to at least."""


class KvLayers:
    """K and V of ``sequences`` sequences of ``tokens`` tokens each, heads as Llama-3.1-8B has them, pages in no order; as many layers as
    ``memory`` has room for. ValueError where that is none."""

    def __init__(self, sequences: int, tokens: int, memory: torch.Tensor):
        pages = -(-tokens // PAGE)
        pool, one = sequences * pages * PAGE, torch.randn(KV_HEADS, DIM, dtype=torch.bfloat16)
        self.nbytes = 2 * sequences * tokens * one.nbytes
        """Of one layer, as a step reads it."""
        layer = 2 * pool * one.nbytes
        count = memory.nbytes // layer
        if not count:
            raise ValueError(f"{sequences} sequences of {tokens} tokens: {memory.nbytes} bytes have no room for {layer}")
        states = memory[: count * layer].view(one.dtype).view(count, 2, pool, *one.shape)
        states.copy_(one)
        self.held: list[Pair] = [(keys, values) for keys, values in states]
        each = torch.ones(sequences, dtype=torch.long)
        table = torch.randperm(sequences * pages).view(sequences, pages)
        self.tables = PageTables(torch.arange(sequences), each * (tokens - 1), each, each * tokens, table, PAGE, 1, tokens)
        self.query = torch.randn(sequences, HEADS, DIM, dtype=torch.bfloat16)

    def attend(self, pool: HostPool) -> Callable[[], object]:
        """One token of each sequence over the next layer at every call."""
        kernel, turn, out = HostKernel(pool), cycle(self.held), torch.empty_like(self.query)
        traits = Traits(DIM**-0.5, None, None, None, None)
        return lambda: kernel.attend(self.query, next(turn), self.tables, traits, out)

    def attention_gbps(self, pool: HostPool, seconds: float) -> float:
        """K and V read a second."""
        attend = self.attend(pool)
        attend()
        done, begun = 0, time.perf_counter()
        while done < LEAST or time.perf_counter() < begun + seconds:
            attend()
            done += 1
        return done * self.nbytes / 1e9 / (time.perf_counter() - begun)


def attention(
    pool: HostPool, layers: KvLayers, seconds: float, copies: Callable[[], Copying] | None, link_gbps: float
) -> Iterator[tuple[str, object]]:
    """Its rate alone; beside copies, which alone take ``link_gbps``, what is left of both. Each within about ``seconds``."""
    alone_gbps = layers.attention_gbps(pool, seconds)
    yield "attention_gbps", round(alone_gbps, 3)
    if copies is not None:
        with copies() as copied:
            begun = time.perf_counter()
            beside_gbps = layers.attention_gbps(pool, seconds)
            left_gbps = copied.gbps_within(begun, time.perf_counter())
        yield "attention_beside_h2d", min(1.0, beside_gbps / alone_gbps)
        yield "h2d_beside_attention", min(1.0, left_gbps / link_gbps)
