"""What routers of layers beyond the next one say of today's hidden state, and how often they were right."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.planner.contract.experts.policies.native import FarState, library

SCORES = 256
"""Scores of coming layers that are computed in one layer, at most: those of 32 layers with 8 experts, or of 2 with 128. One layer's always
are."""

PRIOR_VISITS = 4.0
"""Visits that each rank at each distance counts as having had, half of which used its expert."""

NOBODY = -1


def reach(layers: int, count: int) -> int:
    """How many MoE layers ahead scores are taken, of ``count`` experts each."""
    return min(layers - 1, max(1, SCORES // count))


class FarSight:
    """For each layer beyond the next one: the ``top_k`` experts that its own router scores highest for the hidden state now.

    Only experts that are not held count, because names of held experts are right more often. A name's chance depends on its rank and on how
    many layers ahead it is: the share of visits in which such a name was used. All layers share these counts, since few visits are left
    near the last layers. The policies judge the next layer themselves. O(layers x experts) a visit, computed in far.c for the reason of
    mix.c.
    """

    def __init__(self, layers: int, count: int, top_k: int, least: float = 0.0):
        """``least``: the chance from which an expert is named."""
        far = reach(layers, count) + 1
        visits = np.full((far, top_k), PRIOR_VISITS)
        self._ahead = np.zeros((far, count), np.float32)
        self._arrays: dict[str, np.ndarray] = {
            "visits": visits,
            "right": visits / 2,
            "told": np.full((layers, far, top_k), NOBODY, np.intc),
            "held": np.zeros((layers, count), np.uint8),
            "names": np.zeros((layers * top_k, 2), np.intc),
        }
        self.held = self._arrays["held"].reshape(-1).data
        """[layers x experts]: 1 for what the tier holds that shows its visits here; that tier's to write."""
        addresses = {name: array.ctypes.data for name, array in self._arrays.items()}
        self._state = ctypes.byref(FarState(layers, count, top_k, far - 1, least, **addresses))
        self._names = self._arrays["names"].reshape(-1).data
        self._experts: Any = (ctypes.c_int * count)()
        self._places = ctypes.byref(self._experts), ctypes.c_void_p(self._ahead.ctypes.data)
        self._observe, self._named = library().far_observe, library().far_named

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None) -> None:
        """A decode step was routed to ``experts`` in ``layer``; ``ahead`` [layers, experts] are scores of the layers after it, nearest
        first."""
        n, rows = len(experts), 0 if ahead is None else len(ahead)
        self._experts[:n] = experts
        if rows:
            self._ahead[:rows] = ahead
        used, scores = self._places
        if self._observe(self._state, layer, used, n, scores, rows):
            raise ValueError(f"layer {layer}: scores of {rows} layers after it")

    def forget(self) -> None:
        """A prompt passes: what was named before it is void."""
        self._arrays["told"].fill(NOBODY)

    def named(self, layer: int, most: int) -> Sequence[tuple[int, int]]:
        """(layer, expert) pairs, nearest layer first, then likeliest first: up to ``most`` experts of each layer from ``layer`` + 2 on.
        ``layer`` was observed last. Experts that were held then are left out."""
        n = self._named(self._state, layer, most)
        said = self._names[: 2 * n].tolist()
        return [*zip(said[::2], said[1::2], strict=True)]

    def chance(self, distance: int, rank: int) -> float:
        """Of the expert that a router ``distance`` layers ahead scores highest but for ``rank`` others."""
        return float(self._arrays["right"][distance, rank] / self._arrays["visits"][distance, rank])
