"""Attention of the CPU over K and V that lie in DRAM: its rate alone, and what it and copies to a card leave each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import cycle

import torch

from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.beside.host_serve import flags
from penstock.runtime.kv.attention.page_tables import PageTables, Traits
from penstock.runtime.kv.attention.paged_host import HostKernel
from penstock.runtime.kv.batch.token_shape import Pair
from penstock.runtime.timed.copies import Copying

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
ATTENDED = 16, 8192
"""Sequences, and tokens of each, whose attention is timed."""
AT_ONCE = 4
"""Layers that are asked for at once."""
LOOK_S = 1e-4
"""From one look for their end to the next."""


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
        self._turn = cycle(self.held)
        self._ask, self._done = flags(2)
        each = torch.ones(sequences, dtype=torch.long)
        table = torch.randperm(sequences * pages).view(sequences, pages)
        self.tables = PageTables(torch.arange(sequences), each * (tokens - 1), each, each * tokens, table, PAGE, 1, tokens)
        self.query = torch.randn(sequences, HEADS, DIM, dtype=torch.bfloat16)

    def attention_gbps(self, pool: HostPool, seconds: float) -> float:
        """K and V read a second by one token of each sequence. Layers are asked for as a card asks in steps, a few at once: whoever calls
        sleeps meanwhile, and takes no core."""
        self._nanoseconds(pool)
        took_ns, begun = [self._nanoseconds(pool)], time.perf_counter()
        while time.perf_counter() < begun + seconds:
            took_ns.append(self._nanoseconds(pool))
        return len(took_ns) * AT_ONCE * self.nbytes / sum(took_ns)

    def _nanoseconds(self, pool: HostPool) -> int:
        """Of the threads, for the next layers."""
        kernel, traits, out = HostKernel(pool), Traits(DIM**-0.5, None, None, None, None), torch.empty_like(self.query)
        times = torch.zeros(AT_ONCE, 2, dtype=torch.int64)
        self._ask[0], self._done[0] = AT_ONCE, 0
        for turn, own in enumerate(times, 1):
            asked = kernel.asked(self.query, next(self._turn), self.tables, traits, out)
            pool.attend_asked(asked, self._ask.data_ptr(), self._done.data_ptr(), turn, own.data_ptr())
        while int(self._done[0]) != AT_ONCE:
            time.sleep(LOOK_S)
        return int((times[:, 1] - times[:, 0]).sum())


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
