"""A matrix of weights that a checkpoint holds in a coded format, in several tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.planner.contract.given.formats import Format


class Leaf(NamedTuple):
    """One stored tensor of a matrix."""

    tensor: str
    """Its name in the file."""
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix, or one for each routed expert, in the tensors that it is decoded from."""

    name: str
    """That its tensor would have, were it not coded: ``...q_proj.weight``, ``...experts.gate_up_proj``."""
    shape: tuple[int, ...]
    """(rows, columns) of the decoded matrix, or (experts, rows, columns)."""
    format: Format
    leaves: Mapping[str, Leaf]
    """By the names that the format's decoder knows them by. What decoding does not need is left out, and never read."""
    heads: int = 0
    """Of queries or keys whose rows lie in turn: of each head one of its first half, one of its second. 0: rows are in order."""

    @property
    def nbytes(self) -> int:
        """Of all leaves, as stored."""
        return sum(leaf.nbytes for leaf in self.leaves.values())

    @property
    def elements(self) -> int:
        return math.prod(self.shape)
