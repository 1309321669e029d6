"""How many tokens are drafted, by the number of sequences in the pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.planner.contract.speculation.acceptance import Acceptance
from penstock.planner.contract.speculation.chain_length import ChainLength


@dataclass
class ChainLengths:
    """A :class:`ChainLength` for each number of sequences. What drafts are worth is learnt for all of them together.

    ``most(rows)`` drafts have room behind each of so many sequences; ``planned(rows, k)`` is what the plan says that a pass takes in which
    each has ``k`` of them.
    """

    most: Callable[[int], int]
    planned: Callable[[int, int], float]
    acceptance: Acceptance
    _of: dict[int, ChainLength] = field(default_factory=dict)

    def of(self, rows: int) -> ChainLength:
        """For so many sequences."""
        if rows not in self._of:
            self._of[rows] = ChainLength(self.most(rows), partial(self.planned, rows), self.acceptance)
        return self._of[rows]
