"""The ways in which compute meets units: straight from DRAM on the CPU, through the VRAM ring on a GPU, or always there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.planner.common.measures import GB
from penstock.planner.common.timeline.spans import H2D, SSD
from penstock.planner.contract.decided.placement import Placement, Unit
from penstock.planner.contract.given.hardware import Gpu
from penstock.planner.contract.policy.rounds import Rounds
from penstock.planner.contract.policy.turns import Turns
from penstock.planner.contract.policy.walk import Walk, Walker
from penstock.planner.contract.prices.stages import h2d_gbps
from penstock.planner.simulate.lanes.dram_lane import SimulatedDram
from penstock.planner.simulate.lanes.events import Record
from penstock.planner.simulate.lanes.lanes import Lanes, Work, ns
from penstock.planner.simulate.lanes.ring_lane import SimulatedRing


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


class WalkedDram:
    """Units of which some pass through DRAM, as one of two rings asks for them, like the runtime's: ``ring_lane.UnitSource``."""

    def __init__(self, walk: Walk, dram: SimulatedDram):
        self._walker, self._dram, self._passing = Walker(walk), dram, walk.passing

    def arrived(self, unit: Unit) -> bool:
        return unit not in self._passing or self._dram.arrived(unit)

    def ask(self, unit: Unit) -> None:
        for each in self._walker.reach(unit):
            self._dram.ask(each)
            if each not in self._passing:
                self._dram.take(each)
                self._dram.give_back(each)

    def take(self, unit: Unit) -> None:
        if unit in self._passing:
            self._dram.take(unit)

    def give_back(self, unit: Unit) -> None:
        if unit in self._passing:
            self._dram.give_back(unit)


class CardFeed:
    """Compute reads a streamed unit in its ring slot; a resident one is always there. Where a router's choice is read back, the host issues
    no kernels beyond it."""

    waits_for = H2D

    def __init__(self, ring: SimulatedRing, reads_back: bool):
        self._ring = ring
        self._reads_back = reads_back
        self._streamed = frozenset(ring.units)
        self._entered = self._left = 0
        self._end = 0

    def begin_pass(self) -> None:
        self._ring.begin_pass()
        self._end = self._entered + (0 if self._reads_back else len(self._ring.units))

    def ask(self, unit: Unit) -> None:
        """The host has asked as soon as it could."""
        if self._reads_back and unit in self._streamed:
            self._end = self._entered + 1

    def ready(self, unit: Unit) -> bool:
        return unit not in self._streamed or self._ring.copied(self._entered)

    def enter(self, unit: Unit) -> None:
        """Kernels were issued before."""
        self._entered += unit in self._streamed

    def leave(self, unit: Unit) -> None:
        if unit in self._streamed:
            self._ring.free(self._left)
            self._left += 1

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


class RecordedFeed:
    """A recorded step's units come as it was recorded: the copy into a slot is queued when the unit that lay there is left, behind all that
    were queued before. Some are for the next step, which waits for each where it is used.

    Seconds of the change from the ring to recorded steps are those of copying their first units, whatever the ring has there.
    """

    waits_for = H2D

    def __init__(self, units: Sequence[Unit], slots: Mapping[str, int], size: Callable[[Unit], tuple[int, int]], lanes: Lanes):
        self._rounds = Rounds([unit.ring_class for unit in units], slots)
        self._units, self._size, self._lanes = tuple(units), size, lanes
        self._index = {unit: i for i, unit in enumerate(units)}
        self._there: set[int] = set()
        self._coming: set[int] = set()

    def begin_pass(self) -> None:
        if not self._there and not self._coming:
            for i in self._rounds.first:
                self._copy(i)

    def ask(self, unit: Unit) -> None:
        """What comes when was settled beforehand."""

    def ready(self, unit: Unit) -> bool:
        i = self._index.get(unit)
        return i is None or i in self._there

    def enter(self, unit: Unit) -> None:
        """A unit stays where it came to until it is left."""

    def leave(self, unit: Unit) -> None:
        i = self._index.get(unit)
        if i is not None:
            self._there.discard(i)
            self._copy(self._rounds.behind(i))

    def go_on(self) -> bool:
        return False

    def state(self) -> tuple[object, ...]:
        return tuple(sorted(self._there)), tuple(sorted(self._coming))

    def rebase(self, passed_ns: int) -> None:
        """No time is kept."""

    def _copy(self, i: int) -> None:
        unit = self._units[i]
        length_ns, nbytes = self._size(unit)
        self._coming.add(i)
        self._lanes.add(H2D, Work((unit.kind, unit.layer), str(unit), nbytes, partial(self._arrived, i)), length_ns)

    def _arrived(self, i: int) -> None:
        self._coming.discard(i)
        self._there.add(i)


Feed = HostFeed | CardFeed | ResidentFeed | RecordedFeed


@dataclass(frozen=True)
class Feeds:
    """What all feeds of a plan have in common. ``walk``: what its launched passes ask DRAM for, where some of them leave units out."""

    placement: Placement
    gpu: Gpu | None
    wrap_around: bool
    dram: SimulatedDram
    lanes: Lanes
    record: Record
    walk: Walk | None = None

    def launched(self, reads_back: bool) -> Feed:
        """How passes meet units that are launched one after the other."""
        if self.gpu is None:
            return HostFeed(self.dram)
        units = self.placement.streamed_units
        return self._ring(units, self.gpu, reads_back) if units else ResidentFeed()

    def steps(self, beside: bool) -> Feed | None:
        """How steps meet units that are recorded, or of which the CPU computes some ``beside`` the card; None where no pass copies any."""
        placement, gpu = self.placement, self.gpu
        units = placement.step_units if beside else placement.streamed_units
        if gpu is None or not placement.streamed_units:
            return None
        if self.walk is not None:
            return self._ring(units, gpu, False)
        return RecordedFeed(units, _slots(placement), partial(_copied, placement, gpu), self.lanes) if units else ResidentFeed()

    def _ring(self, units: Sequence[Unit], gpu: Gpu, reads_back: bool) -> CardFeed:
        placement, walk = self.placement, self.walk
        late = () if walk is None else walk.late(units)
        classes, distance = [u.ring_class for u in units], placement.weights.vram.prefetch_distance
        turns = Turns(classes, _slots(placement), distance, self.wrap_around, late=late)
        copies = [_copied(placement, gpu, unit) for unit in units]
        source = self.dram if walk is None else WalkedDram(walk, self.dram)
        ring = SimulatedRing(units, turns, lambda n: copies[n % len(copies)], source, self.lanes, self.record, H2D)
        return CardFeed(ring, reads_back)


def _slots(placement: Placement) -> dict[str, int]:
    """Of each class of the ring."""
    return {name: count for name, (count, _) in placement.ring_classes.items()}


def _copied(placement: Placement, gpu: Gpu, unit: Unit) -> tuple[int, int]:
    """Nanoseconds and bytes of copying ``unit``."""
    nbytes = placement.unit_bytes(unit)
    return ns(nbytes / h2d_gbps(gpu, nbytes, placement.weights.h2d.chunk_bytes) / GB), nbytes
