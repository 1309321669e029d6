"""Where the time from process start to first token went."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

_BEGUN = 19
"""Which field behind its name says when a process began, in ticks."""


class Startup:
    """Seconds of the main thread by phase; the first mark counts from the start of the process."""

    def __init__(self) -> None:
        self._last = time.time() - _age_s()
        self.seconds: dict[str, float] = {}

    @property
    def so_far_s(self) -> float:
        """Since the last mark, or the start of the process."""
        return time.time() - self._last

    def mark(self, phase: str) -> None:
        """Everything since the last mark was ``phase``."""
        now = time.time()
        self.add(phase, now - self._last)
        self._last = now

    def skip(self) -> None:
        """What was done since the last mark is no part of a start."""
        self._last = time.time()

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def facts(self, beside: Mapping[str, tuple[float, int]]) -> dict[str, dict[str, float]]:
        """For the report. ``beside`` is what other threads did meanwhile: seconds, and bytes where there were any."""
        return {
            "start_s": self.seconds,
            "start_beside_s": {name: seconds for name, (seconds, _) in beside.items()},
            "start_beside_bytes": {name: nbytes for name, (_, nbytes) in beside.items() if nbytes},
        }


def _age_s() -> float:
    """Of this process, by the clock that the kernel notes its beginning in; the time of day of the boot is known by whole seconds only."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_BEGUN])
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
