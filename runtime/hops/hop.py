"""A hop: hidden states that go from one rank to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Hop(Protocol):
    """One way between two ranks. What comes, comes in the order in which it was sent."""

    def receive(self, into: torch.Tensor) -> None:
        """Fill ``into``, for kernels that are issued from now on."""

    def coming(self, into: torch.Tensor) -> Callable[[], None]:
        """The same in two: ``into`` is filled meanwhile, for kernels that are issued after the call of what is returned."""

    def send(self, hidden: torch.Tensor) -> None:
        """Once the kernels that were issued so far have made it. ``hidden`` may not be written to any more."""


@dataclass
class HopMeter:
    """What went by hops, as far as the host knows."""

    received: int = 0
    """Hops that came."""
    received_bytes: int = 0
    sent_bytes: int = 0
    waited_s: float = 0.0
    """Seconds in which the host waited for what came; a card waits by itself."""
