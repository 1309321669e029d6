"""How fast the CPU computes FFNs in each format where they lie, alone and beside copies to a card: `planner probe` runs this as a process.

    python -m penstock.runtime.timed.host_product_times cores=16 [seconds=4] [gpu=0]

Ends with one JSON line: ``turned_bytes``, of the BF16 units that take turns; ``threads``; ``bus_gbps``, the most that passed, copies
included; ``products``, format -> rows of [rows of the pass, GB/s of stored bytes], and ``f16_products``, the same of passes in F16; with a
card ``beside_h2d``, the share of these that is left beside copies, ``h2d_beside``, the share that is left of the copies, and
``format_threads``, format -> threads where more than ``threads`` pay; ``attention_gbps``, K and V that attention reads, and with a
card ``attention_beside_h2d`` and ``h2d_beside_attention``. Or ``unbuilt``: why there are none. Takes 1.1 times :func:`uncached_bytes` of
DRAM, in which units take turns, and 64 MiB of the card. All of it is filled at once: of a matrix of each format its own bytes at random
took longer than all that is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median
from types import MappingProxyType

import torch

from penstock.planner.common.host_memory import uncached_bytes
from penstock.planner.common.threads import most_threads
from penstock.runtime.beside.host_ffn import HostFfn
from penstock.runtime.beside.host_library import products_unbuilt
from penstock.runtime.beside.host_matrix import HostMatrix, host_matrix_of
from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.memory.device import CudaDevice
from penstock.runtime.timed.attention_times import ATTENDED, KvLayers, attention
from penstock.runtime.timed.copies import Copies, Copying
from penstock.runtime.timed.decoder_times import COLUMNS, RANDOM_BYTES, Stretch, random_bits, samples

MATRIX_ROWS = 14336
"""With ``COLUMNS`` the FFN of an 8B model, which is timed as a unit: its last matrix has wider rows than the first two."""
PASS_ROWS = (1, 2, 4, 8, 16)
PLAIN: Mapping[torch.dtype, str] = MappingProxyType({torch.bfloat16: "BF16", torch.float16: "F16"})
"""The formats of weights as they are computed with."""
PATIENCE = 4
"""Times the seconds that were asked for, in BF16 and again in F16: formats that are not begun by then get no rate, so that others do."""
ROUNDS = 3
"""At the beginning, and of the threads that were chosen as many a minute later: a host whose neighbours were busy at the beginning gave
one row 79 GB/s, eight rows 88, and one row 95 after the probe. Numbers of threads take turns, too: a host of other machines drifts by more
than they differ. On one H100's, 12 threads were chosen by one round, and steps took 74 to 78 ms in place of 70 to 75 with 14."""
SHARES = ((3, 4), (7, 8), (1, 1), (1, 2))
"""Of the cores that products may have, as threads that are tried."""
LEAST = 3
"""Products that are timed at least."""
PAYS = 1.03
"""Times as many bytes a second, of CPU and link together, from which on a format has threads of its own."""


def units_of(name: str, stretch: Stretch, dtype: torch.dtype = torch.bfloat16) -> list[HostFfn]:
    """FFNs alike, in format ``name``, that compute with ``dtype``, as many as ``stretch`` has room for; none where the CPU has no product
    with it."""
    stretch.rewind()
    found: list[HostFfn] = []
    with suppress(IndexError):
        while (unit := _unit(name, stretch, dtype)) is not None:
            found.append(unit)
    return found


def _unit(name: str, stretch: Stretch, dtype: torch.dtype) -> HostFfn | None:
    shapes = (MATRIX_ROWS, COLUMNS), (MATRIX_ROWS, COLUMNS), (COLUMNS, MATRIX_ROWS)
    gate, up, down = (_matrix(name, stretch, *shape) for shape in shapes)
    if gate is None or up is None or down is None or not down.takes(dtype):
        return None
    return HostFfn(gate, up, down, dtype=dtype)


def _matrix(name: str, stretch: Stretch, rows: int, columns: int) -> HostMatrix | None:
    plain = {form: {"weight": ((rows, columns), dtype)} for dtype, form in PLAIN.items()}
    parts = {**plain, **samples(rows, columns)}[name]
    return host_matrix_of(name, stretch.cut(parts))


def plain_units(stretch: Stretch, dtype: torch.dtype = torch.bfloat16) -> list[HostFfn]:
    """Weights of ``dtype``, of numbers that are drawn: bytes at random would be numbers that a CPU is slow with."""
    stretch.fill(torch.randn(RANDOM_BYTES // dtype.itemsize).to(dtype))
    return units_of(PLAIN[dtype], stretch, dtype)


def unit_gbps(pool: HostPool, turn: Iterator[HostFfn], rows: int, seconds: float) -> float:
    """Stored bytes a second of units of ``rows`` rows, the next one of ``turn`` at every call: by the median. A core that another program
    had for a moment would halve a rate that is timed for so short."""
    first = next(turn)
    x = torch.randn(rows, first.inputs).to(first.dtype)
    if first.dtype is torch.float16:
        x.zero_()  # F16 does not hold what weights of bytes at random make of others, and inputs without an end are slower
    out = torch.empty(rows, first.outputs, dtype=first.dtype)
    pool.ffn(first, x, out)
    took, end = list[float](), time.perf_counter() + seconds
    while len(took) < LEAST or time.perf_counter() < end:
        begun = time.perf_counter()
        pool.ffn(next(turn), x, out)
        took.append(time.perf_counter() - begun)
    return first.bytes / 1e9 / median(took)


@dataclass(frozen=True)
class Tried:
    """GB/s of products by so many threads, and of copies, in one stretch of time; of the latter 0 without a card."""

    threads: int
    alone: float
    link: float
    beside: float
    link_beside: float

    @property
    def together(self) -> float:
        """Beside each other."""
        return self.beside + self.link_beside

    @classmethod
    def of(cls, units: Sequence[HostFfn], threads: int, seconds: float, copies: Callable[[], Copying] | None) -> Tried:
        """Of products with one row of ``units``, within about a third of ``seconds``."""
        turn = cycle(units)
        with closing(HostPool(threads)) as pool:
            alone = unit_gbps(pool, turn, 1, seconds / 8)
            if copies is None:
                return cls(threads, alone, 0.0, alone, 0.0)
            with copies() as copied:
                begun = time.perf_counter()
                time.sleep(seconds / 16)
                link = copied.gbps_within(begun, time.perf_counter())
                begun = time.perf_counter()
                beside = unit_gbps(pool, turn, 1, seconds / 8)
                return cls(threads, alone, link, beside, copied.gbps_within(begun, time.perf_counter()))


def measured(cores: int, seconds: float, device: torch.device | None) -> Iterator[tuple[str, object]]:
    """Name and value of each figure, within about ``seconds``."""
    stretch = Stretch(uncached_bytes())
    plain = plain_units(stretch)
    copies = None
    if device is not None:
        stretch.lock(CudaDevice(device.index))
        copies = partial(Copies, device, stretch.memory)  # what units read is copied, too: as much as no cache holds
    most = min(cores, most_threads())
    counts = sorted({max(1, most * part // whole) for part, whole in SHARES}, reverse=True)
    tried = [Tried.of(plain, count, seconds / ROUNDS, copies) for _ in range(ROUNDS) for count in counts]
    threads = max(counts, key=lambda count: median(one.together for one in tried if one.threads == count))
    yield "turned_bytes", sum(unit.bytes for unit in plain)
    yield "threads", threads
    with closing(HostPool(threads)) as pool:
        products = {PLAIN[torch.bfloat16]: by_rows(pool, plain, seconds)}
        halves = {PLAIN[torch.float16]: by_rows(pool, plain_units(stretch, torch.float16), seconds)}
        yield from attention(pool, KvLayers(*ATTENDED, stretch.memory), seconds / 8, copies, max(one.link for one in tried))
    stretch.fill(random_bits())
    of_their_own = dict[str, int]()
    end = time.perf_counter() + PATIENCE * seconds
    for name in samples(MATRIX_ROWS):
        if time.perf_counter() < end and (units := units_of(name, stretch)):
            wanted = threads if copies is None else wanted_threads(units, threads, most, seconds / 32, copies)
            if wanted != threads:
                of_their_own[name] = wanted
            with closing(HostPool(wanted)) as pool:
                products[name] = by_rows(pool, units, seconds)
    end = time.perf_counter() + PATIENCE * seconds
    for name in samples(MATRIX_ROWS):
        if time.perf_counter() < end and (units := units_of(name, stretch, torch.float16)):
            with closing(HostPool(of_their_own.get(name, threads))) as pool:
                halves[name] = by_rows(pool, units, seconds)
    plain = plain_units(stretch)
    tried += [Tried.of(plain, threads, seconds / ROUNDS, copies) for _ in range(ROUNDS)]
    one_row = [one for one in tried if one.threads == threads]
    products[PLAIN[torch.bfloat16]][0] = [1, round(median(one.alone for one in one_row), 3)]
    yield "bus_gbps", max(max(one.together, one.alone) for one in tried)
    if copies is not None:
        yield "beside_h2d", min(1.0, median(one.beside / one.alone for one in one_row))
        yield "h2d_beside", min(1.0, median(one.link_beside for one in one_row) / max(one.link for one in tried))
    yield "ahead_bytes", pool.ahead_bytes
    yield "products", products
    yield "f16_products", halves
    yield "format_threads", of_their_own


def wanted_threads(units: Sequence[HostFfn], usual: int, most: int, seconds: float, copies: Callable[[], Copying]) -> int:
    """Threads by which ``units`` of one row and the link move most together: ``usual``, or ``most`` where these pay. A bus that is full has
    nothing more for them; decoding in a few bits does not fill it."""
    if usual == most:
        return usual
    moved, turn = {}, cycle(units)
    with copies() as copied:
        for count in (usual, most):
            with closing(HostPool(count)) as pool:
                begun = time.perf_counter()
                gbps = unit_gbps(pool, turn, 1, seconds)
                moved[count] = gbps + copied.gbps_within(begun, time.perf_counter())
    return most if moved[most] > PAYS * moved[usual] else usual


def by_rows(pool: HostPool, units: Sequence[HostFfn], seconds: float) -> list[list[float]]:
    """Rows of [rows of a pass, stored GB/s], each within about ``seconds / 64``."""
    turn = cycle(units)
    return [[rows, round(unit_gbps(pool, turn, rows, seconds / 64), 3)] for rows in PASS_ROWS]


def main() -> None:
    """Measure and print."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    if why := products_unbuilt():
        print(json.dumps({"unbuilt": why}))
        return
    device = torch.device("cuda", int(given["gpu"])) if "gpu" in given else None
    with torch.inference_mode():
        print(json.dumps(dict(measured(int(given["cores"]), float(given.get("seconds", "4")), device))))


if __name__ == "__main__":
    main()
