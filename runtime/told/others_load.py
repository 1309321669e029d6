"""What other programs took of the machine while a run was measured."""

from __future__ import annotations

from typing import NamedTuple

from penstock.planner.common.outside.machine_load import Ticks, others_cores

MUCH, LONG_S = 0.05, 5.0
"""Share of the cores, taken by others, from which on a run is told, and seconds that it lasted at least."""


class OthersLoad(NamedTuple):
    """In cores, on average: of ``cores`` that the machine has those that others ``used``, and of these what the host of a virtual machine
    gave to others (``stolen``); over so many ``seconds``."""

    cores: int
    used: float
    stolen: float
    seconds: float

    @classmethod
    def between(cls, begun: Ticks | None, ended: Ticks | None, cores: int) -> OthersLoad | None:
        """None where the kernel does not say."""
        if begun is None or ended is None or ended.at_s <= begun.at_s:
            return None
        seconds = ended.at_s - begun.at_s
        return cls(cores, others_cores(begun, ended), max(0.0, ended.stolen_s - begun.stolen_s) / seconds, seconds)

    @property
    def note(self) -> str | None:
        """What a prediction does not know of; None where it is little, or was looked at for a moment alone."""
        if self.used <= MUCH * self.cores or self.seconds < LONG_S:
            return None
        lent = f", {self.stolen:.1f} of them lent to other virtual machines" if self.stolen >= 0.05 else ""
        return f"others used {self.used:.1f} of {self.cores} cores while the run was measured{lent}: alone it may be faster"
