"""Weigh all evidence, by weights that are learnt on the way: the policy that plans choose by default."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores
from penstock.planner.contract.experts.policies.native import MixState, library

HALF_LIVES_VISITS = (8.0, 32.0, 512.0)
"""Of the decayed frequencies: visits of the layer after which a use counts half."""

FLOOR = 0.002
"""A use that is none counts as this much of one, so that logarithms of frequencies do not fall without end."""

KEEP_LAYERS = 3
"""Layers whose experts are evidence of what the next token will use in the last of them: it, and those visited before it."""

EVIDENCE_EXPERTS = 16
"""Experts of earlier layers that are evidence of what the coming layer will use: those of 8 layers with top-2 routing, of 2 with top-8."""

NEAR = 0.5
"""Worth is NEAR ** (visits until the next use - 1): 1 for an expert that the next visit uses, NEAR for the visit after it."""

KEEP_RATE, FETCH_RATE, WEIGHT_RATE = 0.1, 0.3, 0.1
"""How far one visit moves the tables of evidence for keeping and for fetching, and the weights, at first."""

START_WEIGHT = 0.3
"""Of each decayed frequency and of recency, before anything was seen."""

START_SQUARE = 0.1
"""Of a weight's gradient, before anything was seen."""

LEAST_SCORE = 1e-4
"""A score below it counts as this much, so that logarithms of scores do not fall without end."""


class MixPolicy:
    """Two log-linear models over the experts of a layer, learnt online by logistic regression, their weights shared by all layers.

    *Keeping* learns the worth NEAR ** (visits until the next use - 1), so that experts which are due soon count, too. After each visit the
    target is 1 for the used experts and NEAR times today's worth for the others (temporal differences). Its evidence for each expert:

    * logarithms of decayed frequencies, at several rates;
    * whether the visit just over used it;
    * tables of this token's experts, in this layer and the two before it, and of the last token's in this layer.

    *Fetching* learns the use itself, so its results are probabilities. Its evidence is the coming layer's worth, and tables of the experts
    used in the layers before it.

    Tables and weights learn at the layer's next visit: weights by Adagrad's steps, tables by steps that fall with the root of the layer's
    visits. This class holds the arrays; mix.c computes on them. An observation, O(evidence x experts), is one call, because a numpy call
    beside other work costs several µs: its code has left the caches. Without a compiler that is the price (uncompiled.py).
    """

    needs_ahead: AheadScores | None = None

    def __init__(self, layers: int, count: int, top_k: int, further: Sequence[float] = ()):
        """``further``: the first weights, for fetching, of the features that mix.c makes of the scores which :meth:`_visit` is given."""
        near, far = min(KEEP_LAYERS, layers) + 1, min(max(2, EVIDENCE_EXPERTS // top_k), layers)
        rates, chance = len(HALF_LIVES_VISITS), top_k / count
        features = np.zeros((layers, 2, len(further) + 3 + rates, count), np.float32)
        features[:, :, len(further) + 1] = 1
        fetching, keeping = [*further, 1, 0], [0, *[START_WEIGHT] * (rates + 1)]  # of the coming layer's worth 1, of what is always 1 none
        weights = np.array([*fetching, *keeping], np.float32)
        worth, foreseen = np.full((2, layers, count), chance, np.float32)
        self._worth, self._foreseen = [*worth], [*foreseen]
        self._arrays: dict[str, np.ndarray] = {
            "gain": 1 - 0.5 ** (1 / np.array(HALF_LIVES_VISITS, np.float32)),
            "tables": np.zeros((layers, near + far, count, count), np.float32),
            "weights": weights,
            "squares": np.full_like(weights, START_SQUARE),
            "often": np.full((layers, rates, count), chance, np.float32),
            "odds": np.full((layers, count), np.log(chance / max(1 - chance, FLOOR)), np.float32),
            "worth": worth,
            "foreseen": foreseen,
            "keep_error": np.zeros((layers, count), np.float32),
            "fetch_error": np.zeros((layers, count), np.float32),
            "features": features,
            "rows": np.zeros((layers, 2, near + far, top_k), np.intc),
            "path": np.zeros((2, layers, top_k), np.intc),
            "learnt": np.full(layers, 4.0),
            "latest": np.zeros(layers, np.intc),
            "follows": np.zeros(layers, np.intc),
        }
        sizes = (layers, count, top_k, near, far, rates, len(further))
        constants = (FLOOR, NEAR, LEAST_SCORE, KEEP_RATE, FETCH_RATE, WEIGHT_RATE, chance)
        self._state = ctypes.byref(MixState(*sizes, *constants, **{name: array.ctypes.data for name, array in self._arrays.items()}))
        self._experts: Any = (ctypes.c_int * count)()
        self._experts_place = ctypes.byref(self._experts)
        self._observe, self._study = library().mix_observe, library().mix_study

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        self._visit(layer, experts, None)

    def study(self, layer: int, routed: np.ndarray) -> None:
        routed = np.ascontiguousarray(routed, np.intc)
        tokens, n = routed.shape
        if tokens and self._study(self._state, layer, ctypes.c_void_p(routed.ctypes.data), tokens, n):
            raise ValueError(f"layer {layer}: {routed.shape} experts, {routed.min()} to {routed.max()} of {len(self._experts)}")

    def worth(self, layer: int) -> np.ndarray:
        return self._worth[layer]

    def foresee(self, layer: int) -> np.ndarray:
        return self._foreseen[layer - 1]

    def _visit(self, layer: int, experts: Sequence[int], scores: ctypes.c_void_p | None) -> None:
        """``scores``: where [experts] float32 about the coming layer are."""
        n = len(experts)
        self._experts[:n] = experts
        if self._observe(self._state, layer, self._experts_place, n, scores):
            raise ValueError(f"layer {layer}: experts {experts} of {len(self._experts)}, at least top_k of them")
