"""How often kept experts are found: the curve that a model has without routings of its own, and what any such curve must be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from penstock.planner.contract.decided.decisions import ExpertPolicyName

KNOWN_SHARES = (0.0, 0.25, 0.5, 1.0)
KNOWN_HITS: Mapping[ExpertPolicyName, tuple[float, ...]] = MappingProxyType(
    {
        ExpertPolicyName.mix: (0.0, 0.478, 0.735, 1.0),
        ExpertPolicyName.lru: (0.0, 0.374, 0.614, 1.0),
    }
)
"""Share of one token's experts found, with slots for such a share of a layer's experts: decoding with Mixtral-8x7B, with 2 and with 4 of 8
slots. The mix was log-linear, of recency, frequency and transitions. Belady's clairvoyant policy found 55.7 and 78.3 %. Every expert is
found where all have a slot, and none where none has."""

TOLERANCE = 1e-6
"""What a curve's figures may be off by, written down with six decimals."""


def default_hit_rates(count: int, top_k: int, policy: ExpertPolicyName = ExpertPolicyName.mix) -> tuple[float, ...]:
    """[count + 1]: the known curve by the share of slots, linear between its points. No more are found than there are slots. A policy
    whose figures are not known is taken for the mix."""
    known = KNOWN_HITS.get(policy, KNOWN_HITS[ExpertPolicyName.mix])
    return tuple(min(_between(n / count, known), n / top_k) for n in range(count + 1))


def default_source(policy: ExpertPolicyName) -> str:
    """Where the default comes from, for notes."""
    of = policy if policy in KNOWN_HITS else ExpertPolicyName.mix
    quarter, half = KNOWN_HITS[of][1:3]
    figures = f"{of} on decode steps of Mixtral-8x7B: {quarter:.1%} with 2 of 8 slots, {half:.1%} with 4; rescaled by the share of slots"
    return figures if of is policy else f"{figures}; nothing is known of {policy}"


def _between(share: float, known: Sequence[float]) -> float:
    i = min(bisect_right(KNOWN_SHARES, share), len(KNOWN_SHARES) - 1)
    (x0, x1), (y0, y1) = KNOWN_SHARES[i - 1 : i + 1], known[i - 1 : i + 1]
    return y0 + (y1 - y0) * (share - x0) / (x1 - x0)


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
