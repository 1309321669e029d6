"""What an engine stands on: DRAM that it divides, and the card that it computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.planner.common.interrupt import uninterrupted
from penstock.runtime.company.company import Company
from penstock.runtime.memory.arena import Arena, PageLock

if TYPE_CHECKING:
    import torch

    from penstock.runtime.memory.device import CopyDevice


class Ground(Protocol):
    """DRAM and a card. Whoever uses them has ended before :meth:`close`."""

    @property
    def device(self) -> torch.device:
        """Where is computed."""

    @property
    def company(self) -> Company | None:
        """The processes that run the plan with this one; None where it runs alone."""

    def settle(self) -> None:
        """Wait until the DRAM that is being taken is resident; signals are heard."""

    def arena(self, nbytes: int) -> Arena:
        """At least ``nbytes`` of resident DRAM, once; another thread may still page-lock it."""

    def copier(self) -> CopyDevice | None:
        """The card with the arena page-locked; None where the CPU computes."""

    def close(self) -> None:
        """Give everything back. Safe to call twice."""


class OpenCard:
    """A card that is open already, and DRAM that is taken when it is asked for."""

    def __init__(self, copier: CopyDevice | None, device: torch.device, company: Company | None = None):
        self.device, self.company = device, company
        self._copier = copier
        self._arena: Arena | None = None

    def settle(self) -> None:
        pass

    def arena(self, nbytes: int) -> Arena:
        if self._arena is None:
            with uninterrupted():
                self._arena = Arena(nbytes)
            self._arena.occupy(self._copier if isinstance(self._copier, PageLock) else None)
        return self._arena

    def copier(self) -> CopyDevice | None:
        return self._copier

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
