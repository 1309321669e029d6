"""The CPU's products beside a plain read of the same bytes by the same threads: each format, thread count and number of rows.

    python bench/host_products.py out=host_products.json [threads=1,7,14] [rows=1,4,16] [formats=BF16,INT4-128] [seconds=0.5] [beside=1]

Each pair of a product and its read gets ``seconds``; what is shown is the median of each, in GB/s of stored bytes. Matrices are an 8B
model's FFN, gate, up and down, and take turns over 1 GB or more, so that no cache holds the next one. With ``beside=1`` a card's link is
kept busy by copies to it meanwhile. Thread counts are half of, and the most, that products may have here, where they are not given.
Inputs are BF16, with ``dtype=F16`` F16.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil  # noqa: E402
import torch  # noqa: E402

from bench.cases import Row, run_cases  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.link import machine  # noqa: E402
from penstock.planner.common.host_memory import uncached_bytes  # noqa: E402
from penstock.planner.common.threads import most_threads  # noqa: E402
from penstock.runtime.beside.host_ffn import HostFfn  # noqa: E402
from penstock.runtime.beside.host_library import machine_level  # noqa: E402
from penstock.runtime.beside.host_matrix import HostMatrix, host_matrix_of  # noqa: E402
from penstock.runtime.beside.host_pool import HostPool  # noqa: E402
from penstock.runtime.timed.decoder_times import parts_of, samples  # noqa: E402

HIDDEN, MIDDLE = 4096, 14336
COPIED_BYTES = 64 << 20
TARGET = ">= 0.9"
LEAST = 5
"""Timed calls at least."""


PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Weights as they are computed with."""


def matrix_of(name: str, rows: int, columns: int) -> HostMatrix | None:
    """Random bits in format ``name``; None where the CPU has no product with it."""
    shapes = {"weight": ((rows, columns), PLAIN[name])} if name in PLAIN else samples(rows, columns)[name]
    return host_matrix_of(name, parts_of(shapes, torch.device("cpu")))


def units_of(name: str, dtype: torch.dtype) -> list[HostFfn]:
    """FFNs in format ``name`` that compute with ``dtype``, more than a cache holds."""
    found, wanted = list[HostFfn](), uncached_bytes()
    while not found or len(found) * found[0].bytes < wanted:
        gate, up, down = matrix_of(name, MIDDLE, HIDDEN), matrix_of(name, MIDDLE, HIDDEN), matrix_of(name, HIDDEN, MIDDLE)
        if gate is None or up is None or down is None or not down.takes(dtype):
            return []
        found.append(HostFfn(gate, up, down, dtype=dtype))
    return found


def gbps(pool: HostPool, works: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The median of every one of ``works``, which take turns, by the pool's own clock and bytes."""
    rates: list[list[float]] = [[] for _ in works]
    until = time.perf_counter() + seconds
    while len(rates[0]) < LEAST or time.perf_counter() < until:
        for work, found in zip(works, rates, strict=True):
            before = pool.told()
            work()
            after = pool.told()
            found.append((after.bytes - before.bytes) / 1e9 / (after.busy_s - before.busy_s))
    return [median(found) for found in rates]


class Copies(AbstractContextManager["Copies"]):
    """Page-locked memory to the card, over and over."""

    def __init__(self) -> None:
        self._from = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        self._to = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
        self._stop, self.done = threading.Event(), 0
        self._thread = threading.Thread(target=self._copy)

    def _copy(self) -> None:
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):  # a mode is a thread's own
            while not self._stop.is_set():
                for _ in range(8):
                    self._to.copy_(self._from, non_blocking=True)
                stream.synchronize()
                self.done += 8

    def __enter__(self) -> Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def bare_machine() -> dict[str, Any]:
    """As :func:`bench.link.machine` says it, of a machine that was not probed, and what its CPU knows."""
    card = {"name": torch.cuda.get_device_name()} if torch.cuda.is_available() else None
    known = machine({"gpu": card, "cpu": {"cores": os.cpu_count()}, "dram_bytes": psutil.virtual_memory().total})
    return known | {"processor": platform.processor() or platform.machine(), "instructions": machine_level().name}


def rows_of(name: str, dtype: torch.dtype, threads: Sequence[int], rows: Sequence[int], seconds: float, beside: bool) -> Iterator[Row]:
    """The table's lines of one format, of inputs in ``dtype``."""
    units = units_of(name, dtype)
    if not units:
        return
    gb = sum(unit.bytes for unit in units) / 1e9
    memory = [matrix.kept[0] for unit in units for matrix in (unit.gate, unit.up, unit.down) if matrix is not None]
    for count in threads:
        with HostPool(count) as pool, Copies() if beside else nullcontext():
            for number in rows:
                x = torch.randn(number, HIDDEN).to(dtype)
                if dtype is torch.float16:
                    x.zero_()  # it does not hold what weights of bytes at random make of others
                out = torch.empty(number, HIDDEN, dtype=dtype)
                turn, other = cycle(units), cycle(memory)
                rate, limit = gbps(pool, [lambda: pool.ffn(next(turn), x, out), lambda: pool.read(next(other))], seconds)  # noqa: B023
                target = TARGET if count == max(threads) else ""
                case = f"{name}{' by F16' if dtype is torch.float16 else ''}, {count} threads{' beside H2D' if beside else ''}"
                yield Row(case, f"{number} rows", rate, limit, "GB/s", rate / limit, target, None, 0.0, gb)


def main() -> None:
    """Measure and print."""
    defaults = {"out": "", "threads": "", "rows": "1,2,4,8,16", "formats": "", "seconds": "0.5", "beside": "0", "dtype": "BF16"}
    given = defaults | given_of(sys.argv[1:], defaults)
    most = most_threads()
    threads = [int(n) for n in given["threads"].split(",")] if given["threads"] else sorted({max(1, most // 2), most})
    names = given["formats"].split(",") if given["formats"] else [given["dtype"], *samples(128)]
    rows, seconds, beside = [int(n) for n in given["rows"].split(",")], float(given["seconds"]), given["beside"] == "1"
    dtype = PLAIN[given["dtype"]]
    cases = {name: partial(rows_of, name, dtype, threads, rows, seconds, beside) for name in names}
    run_cases(cases, bare_machine(), Path(given["out"]) if given["out"] else None)


if __name__ == "__main__":
    main()
