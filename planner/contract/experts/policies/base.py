"""What an expert policy is: routings in, what to keep and what to fetch out."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import numpy as np


class AheadScores(StrEnum):
    """Scores of the coming MoE layer's experts that are taken from today's hidden state. More is likelier."""

    router = "router"
    """The coming layer's own router applied to it: shares that sum to 1, all alike while that router is not at hand."""
    centroids = "centroids"
    """Its closeness to the mean hidden state of each expert's tokens in the coming layer."""


class ExpertPolicy(Protocol):
    """Judges the routed experts of every MoE layer, from routings alone; it holds none itself.

    Layers are numbered among the MoE layers, 0 to L - 1, in the order in which each token visits them. Its answers never depend on
    time, so a replay and a run with the same routings see the same decisions. O(experts) work a call, but for ``study``. The arrays
    that it gives are its own: read them before the next call.
    """

    needs_ahead: AheadScores | None
    """Which scores :meth:`observe` must be given with every layer but the last."""

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        """A decode step was routed to ``experts`` in ``layer``: all different, the likeliest first, at least top_k. Of a batch they are
        those of all its tokens, the first token's first. ``ahead`` [experts] is about the MoE layer after ``layer``."""

    def study(self, layer: int, routed: np.ndarray) -> None:
        """A prompt passed ``layer``: ``routed`` [tokens, top_k] are the experts of its tokens, in their order. One call for each layer,
        in order, and O(tokens) work."""

    def worth(self, layer: int) -> np.ndarray:
        """[experts]: the worth of keeping each expert of ``layer`` until the layer's next visit, in any unit. The least is evicted first;
        of equals the one with the higher number. Called after ``observe`` for this layer."""

    def foresee(self, layer: int) -> np.ndarray:
        """[experts]: probability that the coming visit of ``layer`` uses each expert. Asked after the layer before it was observed; for
        layer 0 that is the last layer, one token earlier. Zeros from a policy that does not look ahead."""
