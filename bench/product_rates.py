"""A card's matrix products from the moment it rested until two seconds of them, alone and beside copies: `planner probe` has one rate.

    python bench/product_rates.py device=0 out=product_rates.json       # half a minute
    python bench/product_rates.py device=cpu scale=16 seconds=0.1       # without a card it runs, a sixteenth as wide

A prompt of 2048 tokens through 8B computes for 50 ms, 32 prompts of 512 through 24 layers of 70B for a second and more. A row for each
product and time, over the first time's: TFLOP/s of `F.linear` in BF16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from bench.host_products import bare_machine  # noqa: E402
from bench.keys import given_of, told_keys  # noqa: E402
from penstock.runtime.timed.rank_times import LEAST_READ, TorchCard  # noqa: E402

KEYS = ("device", "scale", "seconds", "out")
SHAPES = {"probed": (4096, 4096, 14336), "8B, 2048 tokens": (2048, 4096, 14336), "70B, 8192 tokens": (8192, 8192, 28672)}
"""Tokens, inputs and outputs of a product."""
RESTED_S = 1.0
WINDOWS = 0.025, 0.1, 0.25, 0.5, 1.0
"""Where each ends, of all the time."""
WEIGHTS, QUEUED = 3, 4
"""Matrices that take turns, as layers do; rounds that wait on the card."""


class Products:
    """Products of one shape on ``device``; takes its weights, tokens and results there."""

    def __init__(self, device: torch.device, shape: tuple[int, int, int]):
        tokens, inputs, outputs = shape
        made = partial(torch.randn, dtype=torch.bfloat16, device=device)
        self._tokens, self._weights = made(tokens, inputs), [made(outputs, inputs) for _ in range(WEIGHTS)]
        self._cuda = device.type == "cuda"
        self._tflop = 2 * tokens * inputs * outputs * WEIGHTS / 1e12

    def over_time(self, seconds: float) -> list[float]:
        """When each round of products ended, of as many as begin within ``seconds`` without a rest."""
        marks = [self._mark()]
        begun = time.perf_counter()
        while time.perf_counter() < begun + seconds:
            for weight in self._weights:
                torch.nn.functional.linear(self._tokens, weight)
            marks.append(self._mark())
            if self._cuda and len(marks) > QUEUED:
                marks[-QUEUED].synchronize()
        if not self._cuda:
            return [mark - marks[0] for mark in marks]
        marks[-1].synchronize()
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]

    def tflops(self, ends: list[float], since: float, until: float) -> float | None:
        """Of the rounds that ended within that time, if any did."""
        before, within = ([end for end in ends if low < end <= high] for low, high in ((-1, since), (since, until)))
        return self._tflop * len(within) / (within[-1] - before[-1]) if within else None

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark


def rows(name: str, shape: tuple[int, int, int], card: TorchCard, seconds: float) -> Iterator[Row]:
    """Of one shape; the limit is its own rate in the first window, without copies."""
    with torch.inference_mode():
        products, limit = Products(card.device, shape), 0.0
        products.over_time(seconds * WINDOWS[0])  # the first ones choose their kernels
        for what, beside in (("alone", nullcontext), ("beside copies", card.busy)):
            time.sleep(min(RESTED_S, seconds))
            with beside():
                ends = products.over_time(seconds)
            for since, until in pairwise((0.0, *(seconds * share for share in WINDOWS))):
                tflops = products.tflops(ends, since, until)
                if tflops is None:
                    continue
                limit = limit or tflops
                yield Row(name, f"{what}, {since:.2f} to {until:.2f} s", tflops, limit, "TFLOP", tflops / limit, "", None, 0, 0)


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    name, scale, seconds = given.get("device", "0"), int(given.get("scale", "1")), float(given.get("seconds", "2"))
    device = torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name))

    def scaled(shape: tuple[int, int, int]) -> tuple[int, int, int]:
        tokens, inputs, outputs = (one // scale for one in shape)
        return tokens, inputs, outputs

    card = TorchCard(device, 1, LEAST_READ)
    cases = {case: partial(rows, case, scaled(shape), card, seconds) for case, shape in SHAPES.items()}
    run_cases(cases, bare_machine() | {"keys": told_keys(given)}, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
