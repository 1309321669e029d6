"""What a launch leaves for the next one: passes of several shapes are recorded over the same units in the same slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.device import Event


class Copied(NamedTuple):
    """A unit that was copied into its slot."""

    unit: Unit
    nbytes: int
    cleared: Event
    """The kernels that read the slot's last unit."""
    end: Event


@dataclass
class Handover:
    """Shared by all recordings that go on from each other. ``words``: int32, one a row, for each of the units that a pass begins with, and
    for each chain of copies."""

    words: torch.Tensor
    names: Iterable[int | str]
    before: list[Copied] = field(default_factory=list)
    """Copies behind the last launch but one, which brought what the last one began with."""
    behind: list[Copied] = field(default_factory=list)
    """Copies behind the last launch."""
    ended: bool = False
    """Whether no copies follow the last launch."""
    since_s: float = 0.0
    """When the first launch began since others had the slots."""

    def __post_init__(self) -> None:
        self.word: dict[int | str, torch.Tensor] = dict(zip(self.names, self.words, strict=True))
        """Of units that a pass begins with, and of chains."""
