"""How often kept experts are found: the curve that a model has without a trace of its own, and what any such curve must be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

KNOWN_SHARES = (0.0, 0.25, 0.5, 1.0)
KNOWN_HITS = (0.0, 0.478, 0.735, 1.0)
"""Share of one token's experts found, with slots for such a share of a layer's experts: decoding with Mixtral-8x7B, a log-linear mix of
recency, frequency and transitions, 47.8 % with 2 of 8 slots and 73.5 % with 4. LRU found 37.4 and 61.4 %, Belady's clairvoyant policy 55.7
and 78.3 %. Every expert is found where all have a slot, and none where none has."""

DEFAULT_SOURCE = "Mixtral-8x7B decode traces, a mix of recency, frequency and transitions: 47.8 % with 2 of 8 slots, 73.5 % with 4"
"""Where the default comes from, for notes."""

TOLERANCE = 1e-6
"""What a curve's figures may be off by, written down with six decimals."""


def default_hit_rates(count: int, top_k: int) -> tuple[float, ...]:
    """[count + 1]: the known curve by the share of slots, linear between its points. No more are found than there are slots."""
    return tuple(min(_known(n / count), n / top_k) for n in range(count + 1))


def _known(share: float) -> float:
    i = min(bisect_right(KNOWN_SHARES, share), len(KNOWN_SHARES) - 1)
    (x0, x1), (y0, y1) = KNOWN_SHARES[i - 1 : i + 1], KNOWN_HITS[i - 1 : i + 1]
    return y0 + (y1 - y0) * (share - x0) / (x1 - x0)


def concave(values: Sequence[float]) -> tuple[float, ...]:
    """The least concave curve over ``values``: a measured one has dents, which are chance."""
    ends = corners(values)
    curve = [values[0]]
    for n0, n1 in zip(ends, ends[1:], strict=False):
        curve += [values[n0] + (values[n1] - values[n0]) * (n - n0) / (n1 - n0) for n in range(n0 + 1, n1 + 1)]
    return tuple(curve)


def corners(values: Sequence[float]) -> list[int]:
    """Indices at which the least concave curve over ``values`` changes its slope, both ends included."""
    hull: list[int] = []
    for n, value in enumerate(values):
        while len(hull) > 1 and not _bends(hull[-2], hull[-1], n, values[hull[-2]], values[hull[-1]], value):
            hull.pop()
        hull.append(n)
    return hull


def _bends(n0: int, n1: int, n2: int, y0: float, y1: float, y2: float) -> bool:
    """Whether the middle point lies above the line between the others, by more than rounding."""
    return (y1 - y0) * (n2 - n0) - (y2 - y0) * (n1 - n0) > 1e-12 * (n2 - n0)


def flaw(hit_rates: Sequence[float], count: int) -> str:
    """What keeps ``hit_rates`` from being a curve of a layer with ``count`` experts, in words; empty for one that is."""
    if len(hit_rates) != count + 1:
        return f"{len(hit_rates)} figures; allowed: {count + 1}, for 0 to {count} slots"
    if abs(hit_rates[0]) > TOLERANCE or abs(hit_rates[-1] - 1) > TOLERANCE:
        return f"{hit_rates[0]:g} with no slot and {hit_rates[-1]:g} with all; allowed: 0 and 1"
    gains = [after - before for before, after in zip(hit_rates, hit_rates[1:], strict=False)]
    for n, gain in enumerate(gains):
        if gain < -TOLERANCE:
            return f"{hit_rates[n + 1]:g} with {n + 1} slots, {hit_rates[n]:g} with {n}; allowed: no fewer found with more"
        if n and gain > gains[n - 1] + 2 * TOLERANCE:
            return f"slot {n + 1} finds {gain:g} more, slot {n} {gains[n - 1]:g}; allowed: no slot more than the one before"
    return ""
