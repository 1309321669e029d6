"""Experts that a pass asks for and no slot keeps: what a tier must fetch, from its slots and the curve of hits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from penstock.planner.contract.decided.decisions import ExpertSlots, MissedExperts
from penstock.planner.contract.experts.expert_hits import corners
from penstock.planner.contract.experts.expert_slots import kept_at_first, kept_in_all
from penstock.planner.contract.given.model import ALONE, ALONE_MORE, ALONE_MOST, SECOND_TIER, Experts, ModelSpec, touched_by_rank

DENSE = 0.9
"""Of a pass's ``spread``: from here on nearly all experts of a layer are touched."""
ALL_ASKED = 0.75
"""A visit that uses at least this share of a layer's experts counts as one of all: experts that are not kept pass through, and all of the
coming layer's are fetched."""

SPLIT_APART = 0.6
"""Where the CPU computes a part of what VRAM misses: of the places that both tiers lose to each other, the share that they still lose.
What it computes is not copied, so it lies in DRAM alone, and VRAM evicts nothing for it.

Acted out with ``mix``, a CPU that takes half to all of it, shares (VRAM, DRAM) of all experts, second tier's weights copied -> split. A
trained Mixtral of 6 layers: (1/4, 1/2) 0.64 -> 0.78, (3/8, 1/2) 0.72 -> 0.89, (1/4, 3/4) 0.60 -> 0.68, (1/2, 3/8) 0.69 -> 0.96. Drawn with
a bias, 12 layers of 128: 0.88 -> 1.02, 0.59 -> 0.74, 0.89 -> 1.04, 0.82 -> 1.01.
"""
SPLIT_ALONE = 5 / 6
"""The same of what the larger tier does not keep (:data:`ALONE`). Shares of that found there: trained (1/4, 3/4) 0.60 -> 0.68; drawn by
presets of an L40S 0.83 and 0.92. The law: 0.70, 0.85, 0.92.
"""
ALIKE = 1e-3
"""Of two numbers of missed experts: their difference, of their sum, that does not matter."""


@dataclass(frozen=True)
class Visit:
    """What a pass over some tokens asks of one MoE layer.

    Slots that keep q experts find the first q of :func:`touched_by_rank`, added up: of one token the share that ``hit_rates`` says. That is
    linear between whole slots, and each slot finds at most as much as the one before it.
    """

    touched: float
    """Experts, on average."""
    spread: float
    """0 for one token, 1 where every expert is touched: then the order is known before the router has spoken."""
    lines: tuple[tuple[float, float], ...]
    """(missed with no slot, fewer for each slot kept): the largest of these lines is what is missed."""
    all_asked: float
    """How likely it is to count as one of all (:data:`ALL_ASKED`)."""
    second_tier: float
    """What one slot of the smaller tier counts for. One token: the model's weight. A pass that touches every expert: the default's, since
    it then matters which experts a tier holds and not how well they were chosen. Between: see :func:`_both_hold`."""
    alone: float
    """Of the experts that the larger tier does not keep, the share that the smaller one does; likewise."""
    alone_most: float
    """The most that this share becomes; likewise."""
    even: float
    """The share of visits that count as missing the mean, where others miss each expert by itself: of n experts u are drawn at once, so the
    number that is missed has (n - u) / (n - 1) of that variance."""

    @property
    def dense(self) -> bool:
        """Whether nearly all experts are touched, so that they pass in order."""
        return self.spread >= DENSE

    def kept_by_either(self, one: float, other: float, units: int) -> float:
        """Experts that either tier keeps of ``units``, where one keeps so many and the other so many:

        larger + min(second_tier * smaller, alone * left + ALONE_MORE * smaller, alone_most * left), left = units - larger
        """
        larger, smaller = max(one, other), min(one, other)
        left = units - larger
        return larger + min(self.second_tier * smaller, self.alone * left + ALONE_MORE * smaller, self.alone_most * left)

    def missed(self, kept: float) -> float:
        """Of one layer, with ``kept`` slots in each on average."""
        return max(0.0, *(none - each * kept for none, each in self.lines))


@lru_cache(maxsize=256)
def visit(experts: Experts, tokens: int, host: MissedExperts = MissedExperts.copied) -> Visit:
    """A pass over ``tokens`` tokens, ``host``: what becomes of experts that VRAM misses. O(experts), kept for the next time."""
    count, top_k = experts.count, experts.top_k
    found = [0.0, *(round(found, 6) for found in accumulate(touched_by_rank(experts, tokens)))]
    touched = found[-1]
    spread = (touched - top_k) / (count - top_k) if count > top_k else 1.0
    ends = corners(found)
    lines = []
    for n0, n1 in zip(ends, ends[1:], strict=False):
        each = (found[n1] - found[n0]) / (n1 - n0)
        lines.append((touched - found[n0] + each * n0, each))
    shared, on_host = _both_hold(spread), host is MissedExperts.split
    second_tier = 1 - shared * apart_in(host) * (1 - experts.second_tier)
    alone = 1 - shared * (SPLIT_ALONE if on_host else 1.0) * (1 - experts.alone)
    alone_most = max(alone, 1 - shared * (1 - ALONE_MOST))
    if spread >= DENSE:
        second_tier, alone, alone_most = SECOND_TIER, ALONE, ALONE_MOST
    even = (touched - 1) / (count - 1) if count > 1 else 1.0
    return Visit(touched, spread, tuple(lines), _all_asked(experts, tokens, touched), second_tier, alone, alone_most, even)


def apart_in(host: MissedExperts) -> float:
    """Of the places that tiers lose to each other where all that is missed is copied, the share that they lose."""
    return SPLIT_APART if host is MissedExperts.split else 1.0


def _both_hold(spread: float) -> float:
    """Experts that both tiers hold are places lost. Of those behind one token's steps, the share that is left behind steps of more rows:

        (1 - spread) ** 2

    What a step reads takes such places first, and more rows read more. Fitted: with 128 experts that are drawn, ``mix`` and both tiers of
    half to nine tenths of them, 1, 0.8 and 0 were found with 1, 4 and 16 rows, whose spread is 0, 0.17 and 0.6. Of a trained Mixtral it was
    1, 0.7 and 0, spread 0, 0.3 and 0.6. LRU loses none of what is drawn. A pass that touches nearly all (:data:`DENSE`) finds what one
    token's steps leave.
    """
    return (1 - spread) ** 2


def _all_asked(experts: Experts, tokens: int, touched: float) -> float:
    """How likely ``tokens`` tokens touch :data:`ALL_ASKED` of a layer's experts: by a normal law, off by 0.03 at most.

    Experts compete for a token's ``top_k`` places, so their number varies by less than if each were touched by itself; by as much less as
    where all are drawn evenly."""
    count, k = experts.count, experts.top_k
    none, neither = (1 - k / count) ** tokens, ((1 - k / count) * max(0.0, 1 - k / max(1, count - 1))) ** tokens
    even, apart = count * none * (1 - none), sum(odds * (1 - odds) for odds in touched_by_rank(experts, tokens))
    variance = apart * (1 + count * (count - 1) * (neither - none**2) / even) if even > 1e-9 else 0.0
    least = math.ceil(ALL_ASKED * count)
    if variance < 1e-9:
        return float(touched >= least)
    return 0.5 * math.erfc((least - 0.5 - touched) / math.sqrt(2 * variance))


@dataclass(frozen=True)
class Misses:
    """Experts of all layers that one pass moves."""

    vram: float = 0.0
    """Not kept in VRAM: each is copied over the link. None without a GPU."""
    dram: float = 0.0
    """Kept in neither VRAM nor DRAM: each is read from the SSD."""

    @property
    def from_dram(self) -> float:
        """Copied from where DRAM keeps them. None without a GPU."""
        return max(0.0, self.vram - self.dram)

    def is_like(self, other: Misses) -> bool:
        """Whether visits that miss so many take as long as those that miss ``other``, but for what no price shows."""
        return all(abs(mine - its) <= ALIKE * (mine + its) for mine, its in ((self.vram, other.vram), (self.dram, other.dram)))


def misses(model: ModelSpec, slots: ExpertSlots | None, tokens: int, gpu: bool) -> Misses:
    """Of one pass over ``tokens`` tokens; none for a dense model."""
    experts = model.experts
    if experts is None or slots is None:
        return Misses()
    one, layers = visit(experts, tokens, slots.host), len(experts.layers)
    vram, dram = kept_in_all(experts, slots.vram_slots) if gpu else 0, kept_in_all(experts, slots.dram_slots)
    either = one.kept_by_either(vram, dram, experts.units)
    return Misses(layers * one.missed(vram / layers) if gpu else 0.0, layers * one.missed(either / layers))


def missed_at_first(model: ModelSpec, slots: ExpertSlots | None, tokens: int, gpu: bool) -> float:
    """As ``Misses.dram``, of a pass for which both tiers hold what a start fills them with: no expert lies in both while one lies in
    none."""
    experts = model.experts
    if experts is None or slots is None:
        return 0.0
    layers = len(experts.layers)
    return layers * visit(experts, tokens).missed(kept_at_first(experts, slots.vram_slots if gpu else 0, slots.dram_slots) / layers)
