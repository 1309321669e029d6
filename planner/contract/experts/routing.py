"""What a model's router chose, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from penstock.planner.contract.experts.policies.base import AheadScores


class Phase(StrEnum):
    """What a token was part of: a pass over a prompt, or a step of its own."""

    prefill = "prefill"
    decode = "decode"


@dataclass(frozen=True)
class Routings:
    """The routings of several prompts, one after another. Memory: 2 bytes an expert chosen, 4 a score."""

    experts: np.ndarray
    """[tokens, layers, top_k], of MoE layers only, the likeliest first."""
    prompt: np.ndarray
    """[tokens]: which prompt, numbered from 0."""
    decode: np.ndarray
    """[tokens]: whether the token was a decode step."""
    count: int
    """Experts of one layer."""
    scores: Mapping[AheadScores, np.ndarray] = field(default_factory=dict)
    """[tokens, layers - 1, experts]: what each layer but the last says of the one after it."""
    dropped: int = 0
    """Tokens at the end of a prompt that the file had without some of their layers, and that are left out."""

    @property
    def layers(self) -> int:
        return self.experts.shape[1]

    @property
    def top_k(self) -> int:
        return self.experts.shape[2]

    def all_decoded(self) -> Routings:
        """The same with every token a step of its own."""
        return replace(self, decode=np.ones_like(self.decode))
