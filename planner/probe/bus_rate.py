"""The host's memory bus: the most bytes a second that pass through it, by reads of the CPU alone and beside copies to a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from penstock.planner.common.measures import GB, align_down, show_bytes
from penstock.planner.probe.dram_rates import HUGE_PAGE_BYTES, Arena
from penstock.planner.probe.findings import CannotMeasure, Figure

PIECE_BYTES = 32 * 2**20
"""Bytes that a thread reads before it looks whether to go on."""
COUNTS = 4
"""Numbers of threads that are tried."""

Beside = Callable[[float, Callable[[], bool]], tuple[float, float, float]]
"""Copies to the device for so many seconds as long as another is going on: their GB/s, and when they began and ended."""


def thread_counts(cores: int) -> list[int]:
    """All cores and halves of them. More hardware threads than cores share what a core has, so fewer may be faster."""
    return sorted({max(1, cores >> halvings) for halvings in range(COUNTS)}, reverse=True)


class Reading:
    """``threads`` of the arena's read it over and over while the ``with`` block runs. The mapping must still be all zero."""

    def __init__(self, arena: Arena, threads: int) -> None:
        self._arena, self._threads = arena, threads
        self._stop = threading.Event()
        self._done: list[tuple[float, int]] = []
        self._futures: list[Future[object]] = []

    def __enter__(self) -> Reading:
        self._futures = self._arena.start(self._read, self._threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for future in self._futures:
            future.result()

    def going(self) -> bool:
        """Whether anything is still being read."""
        return not any(future.done() for future in self._futures)

    def gbps_within(self, start: float, end: float) -> float:
        """GB/s of what was read between two readings of ``time.perf_counter``."""
        return sum(nbytes for at, nbytes in self._done if start < at <= end) / GB / (end - start)

    def _read(self, offset: int, length: int) -> None:
        piece = min(PIECE_BYTES, align_down(length, HUGE_PAGE_BYTES))
        while True:
            for at in range(offset, offset + length - piece + 1, piece):
                if self._stop.is_set():
                    return
                self._arena.read(at, piece)
                self._done.append((time.perf_counter(), piece))


def measure_bus(arena: Arena, seconds: float, beside: Beside | None) -> Iterator[Figure]:
    """The bus's rate, in about ``seconds`` alone and as much again beside copies. Raises CannotMeasure where nothing was read."""
    counts = thread_counts(arena.threads)
    ways: list[tuple[str, Beside]] = [("alone", _nothing)]
    if beside is not None:
        ways.append(("beside copies to the GPU", beside))
    best, told = 0.0, ""
    for name, copying in ways:
        found = []
        for count in counts:
            with Reading(arena, count) as reading:
                copied, start, end = copying(seconds / len(counts), reading.going)
                found.append((reading.gbps_within(start, end) + copied, count, copied))
        total, count, copied = max(found)
        told += f"; {name} {total:.1f} with {count} threads" + (f", {copied:.1f} of it copies" if copied else "")
        best = max(best, total)
    if not best:
        raise CannotMeasure(f"nothing of {show_bytes(arena.nbytes)} was read within {seconds} s")
    tried = ", ".join(map(str, counts))
    yield Figure("dram.bus_gbps", best, f"memchr over {show_bytes(arena.nbytes)} by {tried} threads, the best of them{told}")


def _nothing(seconds: float, _: Callable[[], bool]) -> tuple[float, float, float]:
    """No copies."""
    start = time.perf_counter()
    time.sleep(seconds)
    return 0.0, start, time.perf_counter()
