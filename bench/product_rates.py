"""A card's matrix products soon after it rested, after a second of them, and beside copies: `planner probe` has one rate for all prompts.

    python bench/product_rates.py device=0 out=product_rates.json       # half a minute
    python bench/product_rates.py device=cpu scale=16 seconds=0.1       # without a card it runs, a sixteenth as wide

A prompt of 2048 tokens through 8B computes for 50 ms, 32 prompts of 512 through 24 layers of 70B for a second and more. A row for each
product and time, over the rate as the probe takes it: TFLOP/s of `F.linear` in BF16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.cases import Row, run_cases  # noqa: E402
from bench.host_products import bare_machine  # noqa: E402
from bench.keys import given_of, told_keys  # noqa: E402
from penstock.runtime.timed.rank_times import LEAST_READ, TorchCard  # noqa: E402

KEYS = ("device", "scale", "seconds", "out")
SHAPES = {"8B, 2048 tokens": (2048, 4096, 14336), "70B, 8192 tokens": (8192, 8192, 28672)}
"""Tokens, inputs and outputs of a product."""
PROBED = (4096, 4096, 14336)
RESTED_S, SOON_S = 1.0, 0.05
WEIGHTS = 3
"""That take turns, as layers do."""


class Products:
    """Products of one shape on ``device``; takes its weights, tokens and results there."""

    def __init__(self, device: torch.device, shape: tuple[int, int, int]):
        tokens, inputs, outputs = shape
        made = partial(torch.randn, dtype=torch.bfloat16, device=device)
        self._tokens, self._weights = made(tokens, inputs), [made(outputs, inputs) for _ in range(WEIGHTS)]
        self._settle: Callable[[], None] = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
        self._flops = 2 * tokens * inputs * outputs * WEIGHTS

    def tflops(self, seconds: float) -> float:
        """Mean over ``seconds`` of products without a rest."""
        self._settle()
        begun, times = time.perf_counter(), 0
        while time.perf_counter() < begun + seconds:
            for weight in self._weights:
                torch.nn.functional.linear(self._tokens, weight)
            times += 1
            self._settle()
        return times * self._flops / 1e12 / (time.perf_counter() - begun)


def rows(name: str, shape: tuple[int, int, int], probed: tuple[int, int, int], device: torch.device, seconds: float) -> Iterator[Row]:
    """Of one shape; the limit is the rate of the probe's product over half of ``seconds``."""
    card = TorchCard(device, 1, LEAST_READ)
    with torch.inference_mode():
        limit, products = Products(device, probed), Products(device, shape)
        for one in (limit, products):
            one.tflops(SOON_S)
        limit_tflops = limit.tflops(seconds / 2)
        soon = []
        for _ in range(3):
            time.sleep(min(RESTED_S, seconds))
            soon.append(products.tflops(SOON_S))
        for what, beside, found in (
            ("soon after a rest", nullcontext(), lambda: median(soon)),
            ("after a second", nullcontext(), lambda: (products.tflops(seconds), products.tflops(seconds))[1]),
            ("after a second, beside copies", card.busy(), lambda: (products.tflops(seconds), products.tflops(seconds))[1]),
        ):
            tflops = _within(beside, found)
            yield Row(name, what, tflops, limit_tflops, "TFLOP", tflops / limit_tflops, "", None, 0, 0)


def _within(beside: AbstractContextManager[None], found: Callable[[], float]) -> float:
    with beside:
        return found()


def main() -> None:
    given = given_of(sys.argv[1:], KEYS)
    name, scale, seconds = given.get("device", "0"), int(given.get("scale", "1")), float(given.get("seconds", "1"))
    device = torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name))

    def scaled(shape: tuple[int, int, int]) -> tuple[int, int, int]:
        tokens, inputs, outputs = (one // scale for one in shape)
        return tokens, inputs, outputs

    cases = {case: partial(rows, case, scaled(shape), scaled(PROBED), device, seconds) for case, shape in SHAPES.items()}
    run_cases(cases, bare_machine() | {"keys": told_keys(given)}, Path(given["out"]) if "out" in given else None)


if __name__ == "__main__":
    main()
