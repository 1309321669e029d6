"""Attention on the CPU over KV that lies in DRAM: its bytes a second, beside a plain read of as many, and beside copies to a card.

    python bench/host_attention.py out=host_attention.json [threads=14] [sequences=1,4,16] [tokens=2048,8192] [seconds=0.5] [beside=1]

Each of ``sequences`` decodes one token over ``tokens`` others, heads as Llama-3.1-8B has them (32 queries, 8 of K and V, 128 wide), pages
of 16 tokens in no order. Layers take turns, over 1 GB at least, so that no cache holds the next one. Threads are asked as a card asks them
in a step. With ``beside=1`` a card's link is kept busy meanwhile, and a row says what attention and link carry together over the link
alone: the most that a step could gain whose KV streams.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from bench.cases import Row, run_cases  # noqa: E402
from bench.host_products import LEAST, bare_machine, copies_of, stretch_of  # noqa: E402
from bench.keys import given_of  # noqa: E402
from penstock.planner.common.threads import most_threads  # noqa: E402
from penstock.runtime.beside.host_pool import HostPool  # noqa: E402
from penstock.runtime.timed.attention_times import KvLayers  # noqa: E402
from penstock.runtime.timed.copies import Copies  # noqa: E402

TARGET = ">= 0.9"
ASKED = ">= 1.4"
"""Of a step whose KV lies mostly in DRAM, over streaming it (issue 20)."""


def gbps(work: Callable[[], object], nbytes: int, seconds: float) -> float:
    """The median over calls of ``work``, each of which reads ``nbytes``."""
    found: list[float] = []
    until = time.perf_counter() + seconds
    while len(found) < LEAST or time.perf_counter() < until:
        begun = time.perf_counter()
        work()
        found.append(nbytes / 1e9 / (time.perf_counter() - begun))
    return median(found)


def link_gbps(copies: Copies, work: Callable[[], object], seconds: float) -> float:
    """Of the copies while ``work`` is done over and over."""
    begun = time.perf_counter()
    while time.perf_counter() < begun + seconds:
        work()
    return copies.gbps_within(begun, time.perf_counter())


def rows_of(threads: int, sequences: Sequence[int], tokens: int, seconds: float, beside: bool) -> Iterator[Row]:
    """The table's lines of one length."""
    stretch = stretch_of()
    with HostPool(threads) as pool:
        for count in sequences:
            layers = KvLayers(count, tokens, stretch.memory)
            turn = cycle([part for held in layers.held for part in held])
            read = gbps(lambda: pool.read(next(turn)), layers.nbytes // 2, seconds)  # noqa: B023
            rate = layers.attention_gbps(pool, seconds)
            dram = layers.nbytes * len(layers.held) / 1e9
            case, what = f"attention over {tokens} tokens, {threads} threads", f"{count} sequences"
            yield Row(case, what, rate, read, "GB/s", rate / read, TARGET if count == max(sequences) else "", None, 0.0, dram)
            if not beside:
                continue
            with copies_of(stretch) as copies:
                alone = link_gbps(copies, partial(time.sleep, seconds / 4), seconds)
                begun = time.perf_counter()
                together = layers.attention_gbps(pool, seconds) + copies.gbps_within(begun, time.perf_counter())
            target = ASKED if count == max(sequences) else ""
            yield Row("  with the link, over the link", what, together, alone, "GB/s", together / alone, target, None, 0.0, dram)


def main() -> None:
    """Measure and print."""
    defaults = {"out": "", "threads": str(most_threads()), "sequences": "1,4,16", "tokens": "2048,8192", "seconds": "0.5", "beside": "0"}
    given = defaults | given_of(sys.argv[1:], defaults)
    sequences, lengths = ([int(n) for n in given[key].split(",")] for key in ("sequences", "tokens"))
    seconds, beside = float(given["seconds"]), given["beside"] == "1"
    cases = {f"{tokens} tokens": partial(rows_of, int(given["threads"]), sequences, tokens, seconds, beside) for tokens in lengths}
    with torch.inference_mode():
        run_cases(cases, bare_machine(), Path(given["out"]) if given["out"] else None)


if __name__ == "__main__":
    main()
