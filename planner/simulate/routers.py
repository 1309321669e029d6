"""What the routers choose in a simulation: recorded tokens, or draws with the reuse that the plan expects."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np

from penstock.planner.contract.decided.decisions import ExpertPolicyName, MissedExperts
from penstock.planner.contract.experts.expert_cache import Routing
from penstock.planner.contract.experts.policies import AheadScores, make_expert_policy
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.contract.given.model import Experts
from penstock.planner.contract.plan.plan import Plan


class Routers(Protocol):
    """``next`` gives the routing of ``tokens`` tokens of each of ``sequences`` in MoE layer number ``place``, layers in order. A
    prompt's pass over one token counts as a step, as in a run."""

    def next(self, place: int, sequences: int, tokens: int, prompt: bool) -> Routing: ...


MOST_STAY = 0.5
"""Where the CPU computes missed experts, which VRAM then does not get: of the visits by one step, at most, the share that leaves the order
as it is. So experts stay popular for a while, as those of trained models do. By a trained Mixtral's routings, VRAM that gets a tenth of
what is missed finds what 0.94 of its slots would, and as much as ever where it gets a quarter. Drawn so, 0.97 and 1; where each visit
changes the order, 0.7 to 0.8. VRAM that gets all finds 0.01 less of few experts, and more of 128, of which fewer visits leave the order.
"""


class DrawnRouters:
    """Draws experts that a policy keeps as the plan expects. A token takes experts at drawn depths in the order in which slots keep them:
    n slots, in which all that is missed comes, have the first n, and find the share ``Experts.hit_rates[n]``. Under LRU that is the order
    of their last use. Prompts are drawn evenly.

    After a visit n slots keep the n most worthy of those that they held and those just used (``penstock.planner.replay.stack``). A depth's
    chance is ``top_k`` times what its slot finds more. Depths in drawn order are as long on a line as their chances, and those
    at u, u + 1, u + 2 ... are taken, for a u drawn in [0, 1): each by its own chance, none twice (systematic sampling, Madow 1949).
    """

    def __init__(self, experts: Experts, policy: ExpertPolicyName, seed: int = 0, stays: float = 0.0):
        """``stays``: of the visits by one step, the share that leaves the order as it is."""
        self._stays = stays
        self._policy = make_expert_policy(policy, len(experts.layers), experts.count, experts.top_k)
        self._draw, self._top_k = np.random.default_rng(seed), experts.top_k
        gains = np.maximum(np.diff(np.asarray(experts.hit_rates)), 0.0)
        self._chances = gains * (self._top_k / gains.sum())
        self._order = [self._draw.permutation(experts.count).tolist() for _ in experts.layers]
        """Of each MoE layer, as slots keep them."""

    def next(self, place: int, sequences: int, tokens: int, prompt: bool) -> Routing:
        order, rows = self._order[place], sequences * tokens
        if prompt:
            chosen = np.argsort(self._draw.random((rows, len(order))), axis=1)[:, : self._top_k]
        else:
            chosen = np.array([[order[depth] for depth in self._depths()] for _ in range(rows)], np.intp)
        routing = Routing(chosen, prompt and tokens > 1)
        if routing.prompt:
            self._policy.study(place, chosen)
        else:
            self._policy.observe(place, routing.experts)
        if routing.prompt or not self._stays or self._draw.random() >= self._stays:
            self._order[place] = _kept_behind(order, routing.experts, self._policy.worth(place).tolist())
        return routing

    def _depths(self) -> np.ndarray:
        """[top_k], all different."""
        order = self._draw.permutation(len(self._chances))
        ends = np.cumsum(self._chances[order])
        at = np.searchsorted(ends, self._draw.random() + np.arange(self._top_k), side="right")
        return self._draw.permutation(order[np.minimum(at, len(order) - 1)])


def drawn_routers(plan: Plan, seed: int = 0) -> DrawnRouters:
    """Of ``plan``, whose model has routed experts, by its policy."""
    experts, made = plan.model.experts, plan.decisions.experts
    assert experts is not None and made is not None, "a dense model has no routers"
    popular = made.host is MissedExperts.split and made.policy is ExpertPolicyName.mix
    return DrawnRouters(experts, made.policy, seed, min(MOST_STAY, 2 * experts.top_k / experts.count) if popular else 0.0)


def _kept_behind(order: Sequence[int], used: Sequence[int], worth: Sequence[float]) -> list[int]:
    """``order``, in which slots keep experts, behind a visit of ``used`` ones. Of equal ``worth`` the lower number stays."""
    just, best, found = frozenset(used), [(-worth[expert], expert) for expert in used], list[int]()
    heapify(best)
    for depth, expert in enumerate(order):
        if not best:  # deeper ones have kept their places
            return found + [*order[depth:]]
        if expert not in just:
            heappush(best, (-worth[expert], expert))
        found.append(heappop(best)[1])
    return found


class RecordedRouters:
    """The recorded tokens in their order, those of prompts and those of steps apart, each from the beginning again after its end. Sequences
    of a batch begin at different places."""

    def __init__(self, routings: Routings, needs: AheadScores | None):
        self._routings = routings
        self._pools = {prompt: np.flatnonzero(routings.decode != prompt) for prompt in (True, False)}
        self._pools = {prompt: pool if len(pool) else np.arange(len(routings.decode)) for prompt, pool in self._pools.items()}
        self._scores = None if needs is None else routings.scores[needs]
        self._at = {True: 0, False: 0}

    def next(self, place: int, sequences: int, tokens: int, prompt: bool) -> Routing:
        pool = self._pools[prompt]
        starts = np.arange(sequences) * len(pool) // sequences + self._at[prompt]
        rows = pool[(starts[:, None] + np.arange(tokens)) % len(pool)].ravel()
        if place == self._routings.layers - 1:
            self._at[prompt] += tokens
        ahead = None
        if self._scores is not None and place < self._routings.layers - 1:
            ahead = self._scores[rows, place].mean(0)[None]
        return Routing(self._routings.experts[rows, place].astype(np.intp), prompt and tokens > 1, ahead)
