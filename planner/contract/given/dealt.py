"""What a rank's model says of the whole one."""

from __future__ import annotations

from dataclasses import dataclass


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
    routed: bool = False
    """Whether the whole model has routed experts, which this rank's layers may lack."""

    @property
    def count(self) -> int:
        """Of ranks."""
        return max(self.owners) + 1

    @property
    def layers(self) -> int:
        """Of the whole model."""
        return len(self.owners)

    @property
    def counts(self) -> tuple[int, ...]:
        """Of layers, of each rank."""
        return tuple(map(self.owners.count, range(self.count)))
