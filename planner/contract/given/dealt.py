"""What a rank's model says of the whole one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ExpertShare(StrEnum):
    """How ranks share a layer's routed experts."""

    whole = "whole"
    """Those of a layer lie with the layer's rank, which computes with them alone."""
    sliced = "sliced"
    """Every rank has an equal slice of each expert's width, so that all links bring a missed one. The layer's rank adds up what
    all made."""


@dataclass(frozen=True)
class Dealt:
    """Which part of a whole model a rank has: :class:`penstock.planner.contract.ranks.dealing.Dealing` says which layers and rows."""

    rank: int
    owners: tuple[int, ...]
    """The rank of each layer of the whole model, in their order."""
    vocab: int
    """Rows of the whole LM head."""
    tied: bool
    """Whether the whole model's LM head is its embedding table. A rank's head is a unit of its own: rows of that table."""
    routed: int = 0
    """Layers of the whole model that route; this rank's may lack experts where others have some."""
    slices: int = 1
    """Of each routed expert, one with every rank. The layers of sliced experts are numbered as in the whole model."""

    @property
    def count(self) -> int:
        """Of ranks."""
        return max(self.owners) + 1

    @property
    def layers(self) -> int:
        """Of the whole model."""
        return len(self.owners)

    @property
    def own(self) -> tuple[int, ...]:
        """The numbers of this rank's layers in the whole model."""
        return tuple(number for number, owner in enumerate(self.owners) if owner == self.rank)

    @property
    def counts(self) -> tuple[int, ...]:
        """Of layers, of each rank."""
        return tuple(map(self.owners.count, range(self.count)))

    @property
    def in_turns(self) -> bool:
        """Whether a rank's next layer is always as many layers on as there are ranks."""
        return all(owner == self.owners[at % self.count] for at, owner in enumerate(self.owners))
