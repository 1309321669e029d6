"""What the link gives copies while a stream of kernels waits for them in one way or another: why recorded steps copy more slowly.

    python bench/waits.py out=waits.json [processes=3] [copies=24] [nbytes=128MiB] [passes=5]

A pass copies `copies` times `nbytes` of page-locked memory to a card; behind each copy a small kernel runs. Each process takes all ways in
turns, `passes` of each behind one that warms up; medians, in GB/s, beside copies alone in the same process:

    events       kernels are launched, and wait for events
    ring         the same, and a copy waits for the kernel behind the last but one: what launched steps do with two slots
    words        as events, by words of page-locked memory, which the copy stream writes
    words here   the same by words in VRAM
    graph words, graph words here    the kernels and their waits are a CUDA graph; copies are given behind its launch
    graph ring   as graph words, and a copy waits for a point of the graph, as ring's for a kernel
    graph        copies, kernels and waits are one CUDA graph, a copy behind the kernel as ring's
    pieces       as ring, and each kernel is a CUDA graph of its own: all waits lie outside
    two alone    copies alone, on two streams in turns
    two rings    as ring, on two streams of copies in turns: what recorded steps did before they had one

Needs a card.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from bench.host_products import bare_machine  # noqa: E402
from bench.keys import given_of, read_values  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.runtime.recorded.stream_words import StreamWords  # noqa: E402

KEYS = ("out", "processes", "copies", "nbytes", "passes")
STRIDE = 16
"""Numbers of 32 bits from word to word."""
ALONE = "alone"
SLOTS = 2
"""Copies that may be ahead of kernels."""


class Copying:
    """One process's memory, streams and words."""

    def __init__(self, copies: int, nbytes: int):
        self._count, self._nbytes, self._card = copies, nbytes, torch.device("cuda", 0)
        self._source = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=True)
        self._into = torch.empty(4 * nbytes, dtype=torch.uint8, device=self._card)
        self._row = torch.ones(1024, device=self._card)
        self._copies, self._kernels = torch.cuda.Stream(self._card), torch.cuda.Stream(self._card)
        self._other = torch.cuda.Stream(self._card)
        """Of copies, where these take two."""
        self._drive = StreamWords()
        self._there = torch.zeros((copies, STRIDE), dtype=torch.int32, pin_memory=True)
        self._here = torch.zeros((copies, STRIDE), dtype=torch.int32, device=self._card)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._points: list[torch.cuda.Event] = []
        """Of a graph."""
        self.ways: Mapping[str, Callable[[], None]] = {
            ALONE: self._alone,
            "events": self._events,
            "ring": partial(self._events, ring=True),
            "words": partial(self._words, self._there),
            "words here": partial(self._words, self._here),
            "graph words": partial(self._recorded, "there", self._there),
            "graph words here": partial(self._recorded, "here", self._here),
            "graph ring": self._behind_points,
            "graph": partial(self._launch, "whole", self._forked),
            "pieces": partial(self._events, True, partial(self._launch, "piece", self._compute)),
            "two alone": partial(self._alone, True),
            "two rings": partial(self._events, True, other=True),
        }

    def gbps(self, way: Callable[[], None]) -> float:
        """Of one pass, from its launch to the last copy and kernel."""
        torch.cuda.synchronize(self._card)
        begun_s = time.perf_counter()
        way()
        torch.cuda.synchronize(self._card)
        return self._count * self._nbytes / 1e9 / (time.perf_counter() - begun_s)

    def _copy(self, number: int) -> None:
        at, to = number % 2 * self._nbytes, number % 4 * self._nbytes
        self._into[to : to + self._nbytes].copy_(self._source[at : at + self._nbytes], non_blocking=True)

    def _stream(self, number: int, other: bool) -> torch.cuda.Stream:
        return self._other if other and number % 2 else self._copies

    def _alone(self, other: bool = False) -> None:
        for number in range(self._count):
            with torch.cuda.stream(self._stream(number, other)):
                self._copy(number)

    def _compute(self) -> None:
        self._row.mul_(1.0)

    def _events(self, ring: bool = False, compute: Callable[[], None] | None = None, other: bool = False) -> None:
        computed: list[torch.cuda.Event] = []
        for number in range(self._count):
            copies = self._stream(number, other)
            with torch.cuda.stream(copies):
                if ring and number >= SLOTS:
                    copies.wait_event(computed[number - SLOTS])
                self._copy(number)
                event = copies.record_event()
            with torch.cuda.stream(self._kernels):
                self._kernels.wait_event(event)
                (compute or self._compute)()
                computed.append(self._kernels.record_event())

    def _give(self, words: torch.Tensor, points: Sequence[torch.cuda.Event] = ()) -> None:
        with torch.cuda.stream(self._copies):
            for number in range(self._count):
                if points and number >= SLOTS:
                    points[number - SLOTS].wait(self._copies)
                self._copy(number)
                self._drive.write(self._copies.cuda_stream, words[number].data_ptr(), 1)

    def _wait(self, words: torch.Tensor, points: list[torch.cuda.Event] | None = None) -> None:
        with torch.cuda.stream(self._kernels):
            for number in range(self._count):
                self._drive.wait(self._kernels.cuda_stream, words[number].data_ptr(), 1)
                self._drive.write(self._kernels.cuda_stream, words[number].data_ptr(), 0)
                self._row.mul_(1.0)
                if points is not None:
                    points.append(torch.cuda.Event(enable_timing=True, external=True))
                    points[-1].record(self._kernels)

    def _words(self, words: torch.Tensor) -> None:
        self._wait(words)
        self._give(words)

    def _recorded(self, name: str, words: torch.Tensor) -> None:
        self._launch(name, partial(self._wait, words))
        self._give(words)

    def _behind_points(self) -> None:
        self._launch("points", partial(self._wait, self._there, self._points))
        self._give(self._there, self._points)

    def _forked(self) -> None:
        self._copies.wait_stream(self._kernels)
        self._events(ring=True)
        self._kernels.wait_stream(self._copies)

    def _launch(self, name: str, record: Callable[[], None]) -> None:
        graph = self._graphs.get(name)
        if graph is None:
            graph = self._graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._kernels, capture_error_mode="thread_local"):
                record()
        with torch.cuda.stream(self._kernels):
            graph.replay()


def measured(pipe: Any, copies: int, nbytes: int, passes: int) -> None:
    """In a process of its own: GB/s of each way, by ``pipe``."""
    copying = Copying(copies, nbytes)
    found: dict[str, list[float]] = {name: [] for name in copying.ways}
    for number in range(passes + 1):
        for name, way in copying.ways.items():
            rate = copying.gbps(way)
            if number:
                found[name].append(rate)
    pipe.send({name: median(rates) for name, rates in found.items()})


def rows(processes: int, copies: int, nbytes: int, passes: int) -> Iterator[Row]:
    context = multiprocessing.get_context("spawn")
    for number in range(1, processes + 1):
        ours, theirs = context.Pipe()
        process = context.Process(target=measured, args=(theirs, copies, nbytes, passes))
        process.start()
        theirs.close()
        try:
            rates: Mapping[str, float] = ours.recv()
        except EOFError:
            raise SystemExit(f"process {number} ended with nothing measured") from None
        finally:
            process.join()
        for name, rate in rates.items():
            yield Row(name, f"process {number}", rate, rates[ALONE], "GB/s", rate / rates[ALONE], "", None, 0, 0)


def main() -> None:
    try:
        given = {"nbytes": "128MiB", "processes": "3", "copies": "24", "passes": "5"} | given_of(sys.argv[1:], KEYS)
        asked = read_values(given, ("out",), ("nbytes",), {"processes": 1, "copies": 1, "passes": 1})
    except UserError as error:
        raise SystemExit(str(error)) from None
    if not torch.cuda.is_available():
        raise SystemExit("this needs a card that torch sees, and there is none")
    case = partial(rows, asked["processes"], asked["copies"], asked["nbytes"], asked["passes"])
    run_cases({"waits": case}, bare_machine(), asked.get("out"))


if __name__ == "__main__":
    main()
