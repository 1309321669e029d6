"""Which points of the SSD's read table are measured, and how often: all once, then again and again those near the best.

Rates of one point differ by a third between samples on a shared or virtual SSD. So samples of different points are interleaved, and a
point's rate is its median. After the first pass the remaining time goes to the points among which a plan chooses. A point that looked best
by luck is then measured again. The table is made monotone: more in flight and larger blocks are never slower; what looks otherwise is
noise.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping

from penstock.planner.common.measures import GB

Point = tuple[int, int]

NEAR_BEST = 0.85
"""A point whose median reaches this share of the best median is measured again."""


def next_point(samples: dict[tuple[int, int], list[float]]) -> tuple[int, int]:
    """Of the points near the best, the one sampled least; the faster one when they tie."""
    medians = {point: statistics.median(rates) for point, rates in samples.items()}
    bar = NEAR_BEST * max(medians.values())
    return min((point for point in medians if medians[point] >= bar), key=lambda p: (len(samples[p]), -medians[p]))


def sweep(
    blocks: tuple[int, ...],
    depths: tuple[int, ...],
    sample: Callable[[int, int], float],
    sample_s: float,
    left_s: Callable[[], float],
    tick: Callable[[], None],
    seed: int = 0,
) -> dict[tuple[int, int], list[float]]:
    """Samples (GB/s) by (block_bytes, queue_depth), until ``left_s()`` runs out.

    A point whose queue alone would take longer than what is left, at the rate seen so far, is left out. At least one
    point is measured.
    """
    points = [(block, depth) for block in blocks for depth in depths]
    random.Random(seed).shuffle(points)
    points.sort(key=lambda point: point != (min(blocks), min(depths)))  # the lightest first: it tells what the others cost
    samples: dict[tuple[int, int], list[float]] = {}
    for block, depth in points:
        best = max((max(rates) for rates in samples.values()), default=0.0)
        cost = max(sample_s, block * depth / GB / best) if best else 0.0
        if samples and cost > left_s():
            continue
        samples[block, depth] = [sample(block, depth)]
        tick()
    while left_s() > 1.5 * sample_s:
        point = next_point(samples)
        samples[point].append(sample(*point))
        tick()
    return samples


def table(samples: dict[tuple[int, int], list[float]]) -> list[list[float]]:
    """Rows [block_bytes, queue_depth, GB/s], in order: medians made monotone, each as heavy as its samples are many."""
    medians = {point: statistics.median(rates) for point, rates in samples.items()}
    smooth = monotone(medians, {point: float(len(rates)) for point, rates in samples.items()})
    return [[block, depth, round(rate, 3)] for (block, depth), rate in sorted(smooth.items())]


def pool_violators(values: list[float], weights: list[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (v1, w1, n1), (v2, w2, n2) = pools[-2:]
            pools[-2:] = [((v1 * w1 + v2 * w2) / (w1 + w2), w1 + w2, n1 + n2)]
    return [value for value, _, n in pools for _ in range(n)]


def monotone(rates: Mapping[Point, float], weights: Mapping[Point, float], rounds: int = 50) -> dict[Point, float]:
    """``rates`` by (block, depth), non-decreasing along both, near the weighted least-squares answer (alternating projections).

    Without it a plan would pick the point whose samples were luckiest, and promise that luck.
    """
    out = dict(rates)
    for _ in range(rounds):
        for axis in (0, 1):
            for fixed in {p[1 - axis] for p in out}:
                line = sorted(p for p in out if p[1 - axis] == fixed)
                out.update(zip(line, pool_violators([out[p] for p in line], [weights[p] for p in line]), strict=True))
    return out
