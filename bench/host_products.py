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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from types import MappingProxyType
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
from penstock.runtime.beside.host_pool import HostPool  # noqa: E402
from penstock.runtime.memory.device import CudaDevice  # noqa: E402
from penstock.runtime.timed.copies import Copies  # noqa: E402
from penstock.runtime.timed.decoder_times import Stretch, random_bits, samples  # noqa: E402
from penstock.runtime.timed.host_product_times import PLAIN, plain_units, units_of  # noqa: E402

TARGET = ">= 0.9"
LEAST = 5
"""Timed calls at least."""
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({form: dtype for dtype, form in PLAIN.items()})


def stretch_of() -> Stretch:
    """Memory that no cache holds, page-locked where there is a card to copy it to."""
    stretch = Stretch(uncached_bytes())
    if torch.cuda.is_available():
        stretch.lock(CudaDevice())
    return stretch


def copies_of(stretch: Stretch) -> Copies:
    """It to the card, over and over."""
    return Copies(torch.device("cuda", 0), stretch.memory)


def units_in(stretch: Stretch, name: str, dtype: torch.dtype) -> list[HostFfn]:
    """FFNs in format ``name`` that compute with ``dtype``, as many as there is room for; none where the CPU has no product with it."""
    if name in DTYPES:
        return plain_units(stretch, dtype)
    stretch.fill(random_bits())
    return units_of(name, stretch, dtype)


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


def bare_machine() -> dict[str, Any]:
    """As :func:`bench.link.machine` says it, of a machine that was not probed, and what its CPU knows."""
    card = {"name": torch.cuda.get_device_name()} if torch.cuda.is_available() else None
    known = machine({"gpu": card, "cpu": {"cores": os.cpu_count()}, "dram_bytes": psutil.virtual_memory().total})
    return known | {"processor": platform.processor() or platform.machine(), "instructions": machine_level().name}


def rows_of(
    stretch: Stretch, name: str, dtype: torch.dtype, threads: Sequence[int], rows: Sequence[int], seconds: float, beside: bool
) -> Iterator[Row]:
    """The table's lines of one format, of inputs in ``dtype``."""
    units = units_in(stretch, name, dtype)
    if not units:
        return
    gb = sum(unit.bytes for unit in units) / 1e9
    memory = [matrix.kept[0] for unit in units for matrix in (unit.gate, unit.up, unit.down) if matrix is not None]
    for count in threads:
        with HostPool(count) as pool, copies_of(stretch) if beside else nullcontext():
            for number in rows:
                x = torch.randn(number, units[0].inputs).to(dtype)
                if dtype is torch.float16:
                    x.zero_()  # it does not hold what weights of bytes at random make of others
                out = torch.empty(number, units[0].outputs, dtype=dtype)
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
    dtype, stretch = DTYPES[given["dtype"]], stretch_of()
    cases = {name: partial(rows_of, stretch, name, dtype, threads, rows, seconds, beside) for name in names}
    run_cases(cases, bare_machine(), Path(given["out"]) if given["out"] else None)


if __name__ == "__main__":
    main()
