"""What the routers choose in a simulation: recorded tokens, or draws with the reuse that the plan expects."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from penstock.planner.contract.experts.expert_cache import Routing
from penstock.planner.contract.experts.policies import AheadScores
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.contract.given.model import Experts


class Routers(Protocol):
    """``next`` gives the routing of ``tokens`` tokens of each of ``sequences`` in MoE layer number ``place``, layers in order. A
    prompt's pass over one token counts as a step, as in a run."""

    def next(self, place: int, sequences: int, tokens: int, prompt: bool) -> Routing: ...


class DrawnRouters:
    """Draws experts by recency. A token takes experts at drawn depths in the order of their last use, of which the n latest hold the
    share ``Experts.hit_rates[n]``. Prompts are drawn evenly.

    A depth's chance is ``top_k`` times what its slot finds more. Depths in drawn order are as long on a line as their chances, and those
    at u, u + 1, u + 2 ... are taken, for a u drawn in [0, 1): each by its own chance, none twice (systematic sampling, Madow 1949).
    """

    def __init__(self, experts: Experts, seed: int = 0):
        self._draw, self._top_k = np.random.default_rng(seed), experts.top_k
        gains = np.maximum(np.diff(np.asarray(experts.hit_rates)), 0.0)
        self._chances = gains * (self._top_k / gains.sum())
        self._latest = [list(self._draw.permutation(experts.count)) for _ in experts.layers]

    def next(self, place: int, sequences: int, tokens: int, prompt: bool) -> Routing:
        latest, count = self._latest[place], len(self._chances)
        rows = sequences * tokens
        if prompt:
            return Routing(np.argsort(self._draw.random((rows, count)), axis=1)[:, : self._top_k], tokens > 1)
        chosen = np.empty((rows, self._top_k), np.intp)
        for row in range(rows):
            chosen[row] = [latest[depth] for depth in self._depths()]
        for expert in [*dict.fromkeys(chosen.ravel().tolist())][::-1]:  # the first was used last, as LRU has it
            latest.remove(expert)
            latest.insert(0, expert)
        return Routing(chosen, False)

    def _depths(self) -> np.ndarray:
        """[top_k], all different."""
        order = self._draw.permutation(len(self._chances))
        ends = np.cumsum(self._chances[order])
        at = np.searchsorted(ends, self._draw.random() + np.arange(self._top_k), side="right")
        return self._draw.permutation(order[np.minimum(at, len(order) - 1)])


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
