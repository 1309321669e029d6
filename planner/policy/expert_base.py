"""What an expert policy is: routings in, what to keep and what to fetch out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class ExpertPolicy(Protocol):
    """Judges the routed experts of every MoE layer, from routings alone; it holds none itself.

    Layers are numbered among the MoE layers, 0 to L - 1, in the order in which each token visits them. Its answers never depend on
    time, so a replay and a run with the same routings see the same decisions. O(experts) work a call.
    """

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        """A token (or a batch) was routed to ``experts`` in ``layer``, all different. ``ahead`` [experts] are scores of the experts of
        the MoE layer after it, from this token's hidden state, for policies that ``needs_ahead``."""

    def worth(self, layer: int) -> np.ndarray:
        """[experts]: how much each expert of ``layer`` is worth keeping until the layer's next visit, in any unit: the least goes first.
        Asked after ``observe`` of the layer's latest visit."""

    def foresee(self, layer: int) -> np.ndarray:
        """[experts]: probability that the coming visit of ``layer`` uses each expert, after all that was observed so far. Zeros from a policy
        that does not look ahead."""

    @property
    def needs_ahead(self) -> str | None:
        """Which scores :meth:`observe` must be given: ``router`` (the coming layer's own router applied to today's hidden state),
        ``centroids`` (its distance from the mean hidden state of each of the coming layer's experts), or None."""
