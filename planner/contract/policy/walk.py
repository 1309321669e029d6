"""Who asks DRAM for which unit where two streams take turns by passes, and one of them leaves some units out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.planner.contract.decided.placement import Placement, Unit


class Walk:
    """``units`` in the order of a pass, of which those that are ``passing`` come from the SSD each time. DRAM is asked for each unit once a
    pass, in that order, whichever stream goes: its cache counts visits. All others stay, and either stream may copy one again.

    Both streams have all that is passing, and ask for none of it before its pass has begun (``Turns.late``). So what one has brought for a
    pass that the other takes never has to be read again.
    """

    def __init__(self, units: Sequence[Unit], passing: Collection[Unit]):
        self.units, self.passing = tuple(units), frozenset(passing)
        self.at = {unit: number for number, unit in enumerate(units)}
        self.stay = frozenset(unit.layer for unit in units if unit.kind != "head" and unit not in self.passing)
        """Layers that never leave DRAM."""
        self.begun = 0
        """Passes of either stream."""
        self._visited = 0
        """Of all units of all passes."""

    @classmethod
    def of(cls, placement: Placement) -> Walk:
        """That of a placement some of whose layers come from the SSD in each pass."""
        read = frozenset(placement.ssd_layers)
        return cls(placement.streamed_units, [u for u in placement.streamed_units if u.kind != "head" and u.layer in read])

    def late(self, units: Sequence[Unit]) -> frozenset[int]:
        """The numbers of those of ``units`` that are passing."""
        return frozenset(number for number, unit in enumerate(units) if unit in self.passing)

    def begin_pass(self) -> None:
        """One stream begins a pass."""
        self.begun += 1

    def through(self, passes: int, unit: Unit) -> tuple[Unit, ...]:
        """The units up to ``unit`` in a pass behind ``passes`` others that DRAM is yet to be asked for; they count as visited now."""
        end, first = passes * len(self.units) + self.at[unit] + 1, self._visited
        self._visited = max(first, end)
        return tuple(self.units[number % len(self.units)] for number in range(first, end))


class Walker:
    """One stream on ``walk``, which asks for its units in their order, those of a pass to come, too."""

    def __init__(self, walk: Walk):
        self.walk = walk
        self._passes, self._at = 0, -1

    def reach(self, unit: Unit) -> tuple[Unit, ...]:
        """``unit`` comes next in this stream -> what DRAM is to be asked for, in this order. What is passing is the last of them."""
        at = self.walk.at[unit]
        behind = self._passes + (at <= self._at)
        # behind passes of the other stream it goes on in the one that has begun
        self._passes, self._at = max(behind, self.walk.begun - 1), at
        return self.walk.through(self._passes, unit)
