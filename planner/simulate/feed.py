"""The ways in which compute meets units: straight from DRAM on the CPU, through the VRAM ring on a GPU, or always there."""

from __future__ import annotations

from penstock.planner.common.timeline.spans import H2D, SSD
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.simulate.dram_lane import SimulatedDram
from penstock.planner.simulate.ring_lane import SimulatedRing


class HostFeed:
    """Compute reads a unit where DRAM holds it."""

    waits_for = SSD

    def __init__(self, dram: SimulatedDram):
        self._dram = dram

    def begin_pass(self) -> None:
        """The window wraps by itself."""

    def ask(self, unit: Unit) -> None:
        self._dram.ask(unit)

    def ready(self, unit: Unit) -> bool:
        return self._dram.arrived(unit)

    def enter(self, unit: Unit) -> None:
        self._dram.take(unit)

    def leave(self, unit: Unit) -> None:
        self._dram.give_back(unit)

    def go_on(self) -> bool:
        return False

    def state(self) -> tuple[object, ...]:
        return ()

    def rebase(self, passed_ns: int) -> None:
        """No time is kept."""


class CardFeed:
    """Compute reads a streamed unit in its ring slot; a resident one is always there. Where a router's choice is read back, the host issues
    no kernels beyond it."""

    waits_for = H2D

    def __init__(self, ring: SimulatedRing, reads_back: bool):
        self._ring = ring
        self._reads_back = reads_back
        self._streamed = frozenset(ring.units)
        self._next = 0
        self._end = 0

    def begin_pass(self) -> None:
        self._ring.begin_pass()
        self._end = self._next + (0 if self._reads_back else len(self._ring.units))

    def ask(self, unit: Unit) -> None:
        """The host has asked as soon as it could."""
        if self._reads_back and unit in self._streamed:
            self._end = self._next + 1

    def ready(self, unit: Unit) -> bool:
        return unit not in self._streamed or self._ring.copied(self._next)

    def enter(self, unit: Unit) -> None:
        """Kernels were issued before."""

    def leave(self, unit: Unit) -> None:
        if unit in self._streamed:
            self._ring.free(self._next)
            self._next += 1

    def go_on(self) -> bool:
        """The host issues kernels of this pass behind every copy that is queued, while the copier goes on."""
        did = False
        while True:
            self._ring.issue(self._end)
            if not self._ring.go_on():
                return did
            did = True

    def state(self) -> tuple[object, ...]:
        return self._ring.state()

    def rebase(self, passed_ns: int) -> None:
        self._ring.rebase(passed_ns)


class ResidentFeed:
    """Everything stays in VRAM."""

    waits_for = H2D

    def begin_pass(self) -> None:
        """Nothing moves."""

    def ask(self, unit: Unit) -> None:
        """It is there."""

    def ready(self, unit: Unit) -> bool:
        return True

    def enter(self, unit: Unit) -> None:
        """It stays there."""

    def leave(self, unit: Unit) -> None:
        """It stays there."""

    def go_on(self) -> bool:
        return False

    def state(self) -> tuple[object, ...]:
        return ()

    def rebase(self, passed_ns: int) -> None:
        """No time is kept."""
