"""What is still to be queued of experts for a card that a visit misses."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.runtime.experts.products.beside_card import Asked
from penstock.runtime.experts.tiers.carried_experts import Carried


@dataclass(slots=True)
class Misses:
    """What a visit still has to bring: experts in DRAM, those on their way from the SSD, and those whose copies are queued."""

    near: deque[int]
    far: dict[int, None]
    started: deque[int]
    at_once: int
    """Experts whose copies share an event: one where each is computed with as it comes, else as many as there are slots for."""
    carried: dict[int, Carried]
    """Of those from the SSD, the ones that readers copy."""
    asked: Sequence[Asked]
    """Of the CPU, which began with them."""
    released: bool = False
    """Whether DRAM may let go of those."""
    decided: bool = False
    """Whether both tiers know what is to stay."""
    looked_ahead: bool = False
    come: bool = False
    """Whether kernels that are issued from now on find all of it."""
    unread: bool = False
    """Whether kernels may be issued before the SSD has brought it."""
    waited_s: float = 0.0
    """How long the host waited for what it has not been told of, though it came."""
