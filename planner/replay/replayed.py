"""Routings acted out under a policy: what it keeps and fetches ahead, for every number of slots. Decode steps are scored, prompts
studied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies import ExpertPolicy, make_expert_policy
from penstock.planner.contract.experts.prefetch import NOTHING, Prefetch
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.replay.stack import Stack

BLOCK_TOKENS = 128
"""Tokens whose foresights are scored together."""

Advance = Callable[[int], None]
"""Called with the number of tokens that were acted out."""


@dataclass(frozen=True)
class Visits:
    """Successive decode steps under a policy."""

    used: np.ndarray
    """[tokens, layers, top_k]: the experts."""
    depth: np.ndarray
    """[tokens, layers, count]: n slots hold an expert of depth below n when its layer is visited."""
    foreseen: np.ndarray
    """[tokens, layers, count]: probabilities that the policy gave just before."""


@dataclass(frozen=True)
class Kept:
    """What the uses of the routings found in slots."""

    uses: int
    tokens: int
    hits: tuple[int, ...]
    """For n = 0, ..., count slots a layer."""

    def rate(self, slots: int) -> float:
        """Share of the uses that were found in ``slots``."""
        return self.hits[slots] / self.uses


@dataclass(frozen=True)
class Fetched:
    """What prefetching would have done beside ``slots``."""

    slots: int
    fetched: int
    right: int
    """Of those fetched: used."""
    missed: int
    """Uses that were not in slots."""
    named: int
    """Uses that are among the ``slots`` likeliest of their layer, held or not."""


@dataclass(frozen=True)
class Replay:
    """A policy's record over a routings."""

    kept: Kept
    fetched: tuple[Fetched, ...]
    """For each number of slots asked for; empty when the policy never looks ahead."""


def replay(
    routings: Routings,
    name: ExpertPolicyName,
    slots: Sequence[int] = (),
    prefetch: Prefetch = NOTHING,
    advance: Advance = lambda tokens: None,
) -> Replay:
    """Act the routings out, and prefetch beside each of ``slots``. The time is that of the policy and O(tokens x layers x count x (count +
    slots)); memory a block's."""
    policy = make_expert_policy(name, routings.layers, routings.count, routings.top_k)
    histogram = np.zeros(routings.count + 1, np.int64)
    fetched = np.zeros((len(slots), 4), np.int64)
    looked = False
    for visits in _act(routings, policy):
        histogram += _depths(visits)
        if visits.foreseen.any():
            looked = True
            for row, n in zip(fetched, slots, strict=True):
                row += _fetch(visits, n, prefetch)
        advance(len(visits.used))
    records = tuple(Fetched(n, *map(int, row)) for n, row in zip(slots, fetched, strict=True)) if looked else ()
    return Replay(_kept(histogram, routings), records)


def replay_belady(routings: Routings, advance: Advance = lambda tokens: None) -> Kept:
    """The most that any policy could find in slots, knowing what comes: those stay whose next use in a decode step comes first. What a
    prompt between steps uses passes through the slots, and may stay, as in :func:`replay`: until then it need not be held."""
    passed = [_passed(routings, *at) for at in passes(routings)]
    decode = [bool(routings.decode[first]) for first, _ in passes(routings)]
    coming = np.full((routings.layers, routings.count), np.inf)
    after: list[np.ndarray] = []
    for t in range(len(passed) - 1, -1, -1):
        after.append(np.take_along_axis(coming, passed[t], 1))
        np.put_along_axis(coming, passed[t], t if decode[t] else np.inf, 1)
    stack, histogram = Stack(routings.layers, routings.count), np.zeros(routings.count + 1, np.int64)
    never = len(passed) + 1.0
    stack.visit(-np.minimum(coming, never), np.tile(np.arange(routings.count), (routings.layers, 1)))  # a prompt left the best
    for used, scored, then in zip(passed, decode, reversed(after), strict=True):
        np.put_along_axis(coming, used, then, 1)
        depth = stack.visit(-np.minimum(coming, never), used)
        if scored:
            histogram += np.bincount(np.take_along_axis(depth, used, 1).ravel(), minlength=routings.count + 1)
            advance(1)
    return _kept(histogram, routings)


def hit_curve(routings: Routings, name: ExpertPolicyName, advance: Advance = lambda tokens: None) -> tuple[float, ...]:
    """Share of a token's experts found in n slots of their layer, for n = 0, ..., count: concave, from 0 to 1.

    It is the least concave curve that is nowhere below what the replay found. Slots are filled when it begins, and prompts pass through
    them, as in a run.
    """
    kept = replay(routings, name, advance=advance).kept
    points = [(n, kept.rate(n)) for n in range(routings.count + 1)]
    hull: list[tuple[int, float]] = []
    for n, rate in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (n - hull[-1][0]) <= (rate - hull[-1][1]) * (hull[-1][0] - hull[-2][0]):
            hull.pop()
        hull.append((n, rate))
    corners, rates = zip(*hull, strict=True)
    return tuple(float(x) for x in np.interp(range(routings.count + 1), corners, rates))


def _act(routings: Routings, policy: ExpertPolicy) -> Iterator[Visits]:
    """Every decode step in blocks, after what came before it."""
    stack = Stack(routings.layers, routings.count)
    for start, end in _runs(routings):
        if routings.decode[start]:
            for first in range(start, end, BLOCK_TOKENS):
                yield _decode(routings, policy, stack, first, min(first + BLOCK_TOKENS, end))
        else:
            for layer in range(routings.layers):
                policy.study(layer, routings.experts[start:end, layer].astype(np.intp))
            stack.visit(np.stack([policy.worth(layer) for layer in range(routings.layers)]), _passed(routings, start, end))


def _passed(routings: Routings, start: int, end: int) -> np.ndarray:
    """[layers, tokens * top_k]: experts of a pass over a prompt, those of several tokens as often."""
    return routings.experts[start:end].astype(np.intp).swapaxes(0, 1).reshape(routings.layers, -1)


def passes(routings: Routings) -> Iterator[tuple[int, int]]:
    """First token and the one after the last of each prompt and each decode step."""
    begins = routings.decode.copy()
    begins[0] = True
    begins[1:] |= routings.decode[:-1] | (np.diff(routings.prompt) != 0)
    bounds = [*np.flatnonzero(begins).tolist(), len(begins)]
    yield from zip(bounds, bounds[1:], strict=False)


def _runs(routings: Routings) -> Iterator[tuple[int, int]]:
    """First token and the one after the last of each pass over a prompt and each series of decode steps."""
    changes = (np.diff(routings.prompt) != 0) | (np.diff(routings.decode.astype(np.int8)) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(routings.prompt)]
    yield from zip(bounds, bounds[1:], strict=False)


def _decode(routings: Routings, policy: ExpertPolicy, stack: Stack, start: int, end: int) -> Visits:
    used = routings.experts[start:end].astype(np.intp)
    scores = routings.scores[policy.needs_ahead][start:end] if policy.needs_ahead else None
    shape = (routings.layers, routings.count)
    depth, foreseen = np.empty((len(used), *shape), np.int16), np.empty((len(used), *shape), np.float32)
    worth = np.empty(shape)
    for t, routed in enumerate(used.tolist()):
        for layer, experts in enumerate(routed):
            foreseen[t, layer] = policy.foresee(layer)
            policy.observe(layer, experts, scores[t, layer] if scores is not None and layer + 1 < routings.layers else None)
            worth[layer] = policy.worth(layer)
        depth[t] = stack.visit(worth, used[t])
    return Visits(used, depth, foreseen)


def _depths(visits: Visits) -> np.ndarray:
    """[count + 1]: how many uses were found at each depth, the last one for those not held at all."""
    return np.bincount(np.take_along_axis(visits.depth, visits.used, 2).ravel(), minlength=visits.depth.shape[2] + 1)


def _kept(histogram: np.ndarray, routings: Routings) -> Kept:
    tokens = int(routings.decode.sum())
    return Kept(tokens * routings.layers * routings.top_k, tokens, (0, *np.cumsum(histogram[:-1]).tolist()))


def _fetch(visits: Visits, slots: int, prefetch: Prefetch) -> tuple[int, int, int, int]:
    """Fetched, right, missed and named as ``Fetched`` has them."""
    used = np.zeros(visits.depth.shape, np.bool_)
    np.put_along_axis(used, visits.used, True, 2)
    outside = visits.depth >= slots
    chosen = _likeliest(np.where(outside, visits.foreseen, 0), prefetch.most, prefetch.least_chance)
    named = _likeliest(visits.foreseen, slots, 0)
    return int(chosen.sum()), int((chosen & used).sum()), int((used & outside).sum()), int((named & used).sum())


def _likeliest(chances: np.ndarray, most: int, least: float) -> np.ndarray:
    """Mask of up to ``most`` experts with the highest chances above ``least``, of equals the lower number."""
    order = np.argsort(-chances, axis=2, kind="stable")[..., :most]
    mask = np.zeros(chances.shape, np.bool_)
    np.put_along_axis(mask, order, True, 2)
    return mask & (chances > least)
