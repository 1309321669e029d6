"""What else the machine does meanwhile: processor time that others take, from the kernel's own counters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

BUSY_BEFORE, BUSY_MEANWHILE = 0.25, 0.5
"""Shares of the cores that others may use before a rate cannot be trusted. While a drive is read, others also work for it."""
LOOK_S = 0.3
"""Seconds for which the machine is looked at before anything is measured."""


@dataclass(frozen=True)
class Ticks:
    """Processor seconds since the machine started: of all processes, and of this one with its children."""

    at_s: float
    everyone_s: float
    """Those that a virtual machine's host gave to others count as well."""
    own_s: float
    stolen_s: float = 0.0
    """Of these."""

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat")) -> Ticks | None:
        """None where the kernel does not say."""
        try:
            fields = stat.read_text(encoding="ascii").splitlines()[0].split()[1:]
            user, nice, system, _, _, _, _, steal = (int(field) for field in fields[:8])
        except (OSError, ValueError, IndexError):
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), (user + nice + system + steal) / ticks, sum(os.times()[:4]), steal / ticks)


@dataclass(frozen=True)
class Load:
    """Of other processes, in cores: before the measurements, while they went on, and the load averages at both ends."""

    cores: int
    """Of the machine, whether this process may use them or not: the kernel counts for all."""
    before_cores: float
    meanwhile_cores: float
    averages: tuple[float, float]

    @property
    def busy(self) -> bool:
        """Whether others took so much that rates are lower than the machine's."""
        return self.before_cores > BUSY_BEFORE * self.cores or self.meanwhile_cores > BUSY_MEANWHILE * self.cores

    def __str__(self) -> str:
        before, after = self.averages
        return (
            f"others used {self.before_cores:.1f} of {self.cores} cores before and {self.meanwhile_cores:.1f} meanwhile, "
            f"load average {before:.1f} before, {after:.1f} after"
        )


class Watch:
    """Made before the measurements. Costs ``LOOK_S`` seconds."""

    def __init__(self, now: Callable[[], Ticks | None] = Ticks.now, sleep: Callable[[float], None] = time.sleep) -> None:
        self._now, self._average = now, os.getloadavg()[0]
        first = now()
        sleep(LOOK_S)
        self._begun = now()
        self._before = others_cores(first, self._begun)

    def load(self, cores: int) -> Load:
        """Up to now, on a machine of ``cores``."""
        return Load(cores, self._before, others_cores(self._begun, self._now()), (self._average, os.getloadavg()[0]))


def others_cores(begun: Ticks | None, ended: Ticks | None) -> float:
    """Cores that others used between the two; 0 where that is not known."""
    if begun is None or ended is None or ended.at_s <= begun.at_s:
        return 0.0
    others_s = ended.everyone_s - begun.everyone_s - (ended.own_s - begun.own_s)
    return max(0.0, others_s) / (ended.at_s - begun.at_s)
