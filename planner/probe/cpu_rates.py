"""The processor: BF16 matrix-vector rate at decode shapes and matrix rate at prefill shapes, through torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.planner.common.host_memory import CACHE_TURNS
from penstock.planner.common.measures import GB, show_bytes
from penstock.planner.contract.prices.stages import FIXED
from penstock.planner.probe.bus_rate import thread_counts
from penstock.planner.probe.dram_rates import Arena
from penstock.planner.probe.findings import CannotMeasure, Figure
from penstock.planner.probe.watched.clocked import median_seconds

if TYPE_CHECKING:
    import torch

MATVEC_ROWS, MATVEC_COLUMNS = 14336, 4096
"""An FFN matrix of an 8B model."""
DENSE_TOKENS, DENSE_ROWS, DENSE_COLUMNS = FIXED.cpu_dense_rows, 4096, 4096
"""Tokens of a prefill chunk times an attention matrix of an 8B model."""
ATTENDED = 32, 8, 128, 2048
"""Heads of queries, and of K and V, their width, and tokens of a context that is attended to: of an 8B model."""


def arena_matrices(arena: Arena, rows: int, columns: int) -> list[torch.Tensor]:
    """The arena as BF16 matrices of [rows, columns], as many whole ones as it holds; no bytes are copied."""
    import torch

    nbytes = rows * columns * 2
    return [
        torch.frombuffer(arena.buffer, dtype=torch.bfloat16, count=rows * columns, offset=i * nbytes).view(rows, columns)
        for i in range(arena.nbytes // nbytes)
    ]


def random_weights(nbytes: int = 2**20) -> bytes:
    """BF16 normal numbers, as bytes, to fill an arena with."""
    import torch

    return torch.randn(nbytes // 2).mul_(0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def measure_cpu(arena: Arena, seconds: float, cache_bytes: int) -> Iterator[Figure]:
    """The matrix-vector rate at the number of threads that is fastest, that number, and the matrix rate with it; torch keeps it. The arena
    is filled with random weights first.

    ``cache_bytes`` is the last-level cache's size: the weights take turns, and the figure says so where they are not many times as large.
    """
    import torch
    from torch.nn.functional import linear

    arena.fill(random_weights())
    matrices = arena_matrices(arena, MATVEC_ROWS, MATVEC_COLUMNS)
    if not matrices:
        raise CannotMeasure(f"{show_bytes(arena.nbytes)} of DRAM do not hold one {MATVEC_ROWS}x{MATVEC_COLUMNS} matrix")
    counts = thread_counts(arena.threads)
    with torch.inference_mode():
        x = torch.randn(1, MATVEC_COLUMNS).to(torch.bfloat16)
        turn = iter(range(10**9))
        tried = []
        for count in counts:
            torch.set_num_threads(count)
            share_s = seconds / len(counts)
            took = median_seconds(lambda: linear(x, matrices[next(turn) % len(matrices)]), share_s, least=len(matrices) + 1)
            tried.append((took, count))
        took, threads = min(tried)
        torch.set_num_threads(threads)
        weights = len(matrices) * MATVEC_ROWS * MATVEC_COLUMNS * 2
        cached = "" if weights > CACHE_TURNS // 2 * cache_bytes else f"; may be flattered by {show_bytes(cache_bytes)} of cache"
        rate = MATVEC_ROWS * MATVEC_COLUMNS * 2 / GB / took
        shape = f"{MATVEC_ROWS}x{MATVEC_COLUMNS}"
        yield Figure("cpu.matvec_gbps", rate, f"F.linear, 1 row, {len(matrices)} rotated BF16 {shape}, {threads} threads{cached}")
        yield Figure("cpu.threads", threads, f"the fastest for cpu.matvec_gbps of {', '.join(map(str, counts))}")

        y = torch.randn(DENSE_TOKENS, DENSE_COLUMNS).to(torch.bfloat16)
        weight = torch.randn(DENSE_ROWS, DENSE_COLUMNS).to(torch.bfloat16)
        took = median_seconds(lambda: linear(y, weight), seconds)
        flops = 2 * DENSE_TOKENS * DENSE_ROWS * DENSE_COLUMNS
        how = f"F.linear, BF16 {DENSE_TOKENS}x{DENSE_COLUMNS} by {DENSE_COLUMNS}x{DENSE_ROWS}, {threads} threads"
        yield Figure("cpu.dense_tflops", flops / 1e12 / took, how)
        yield from _attention(seconds, threads)


def _attention(seconds: float, threads: int) -> Iterator[Figure]:
    """torch's attention, of one token over a context, and of a prompt over itself."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    heads, pairs, dim, context = ATTENDED
    one, prompt = (torch.randn(1, heads, tokens, dim).to(torch.bfloat16) for tokens in (1, context // 2))
    pool = torch.randn(context, 2, pairs, dim).to(torch.bfloat16)  # as a run's KV pages have a token
    keys, values = (pool[:, which].transpose(0, 1)[None] for which in range(2))
    took = median_seconds(lambda: attend(one, keys, values, enable_gqa=True), seconds / 2)
    sizes = f"{heads} heads of {dim}, BF16, {threads} threads"
    nbytes = 2 * heads * context * dim * 2
    yield Figure("cpu.attention_gbps", nbytes / GB / took, f"torch's attention of 1 row over {context}, {pairs} of K and V, {sizes}")
    took = median_seconds(lambda: attend(prompt, prompt, prompt, is_causal=True), seconds / 2)
    flops = 2 * heads * dim * (context // 2) ** 2
    yield Figure("cpu.attention_tflops", flops / 1e12 / took, f"torch's causal attention over {context // 2} tokens, {sizes}")
