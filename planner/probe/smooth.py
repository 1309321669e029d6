"""A noisy table of rates made monotone: more in flight and larger blocks are never slower, what looks otherwise is noise."""

from __future__ import annotations

from collections.abc import Mapping

Point = tuple[int, int]


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
