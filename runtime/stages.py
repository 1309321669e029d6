"""What each stage did in each phase of a run: bytes, busy seconds, rate, and for how long it was waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from runtime.engine import Engine


@dataclass(frozen=True)
class StageUse:
    """``busy_s`` is the time in which the stage had work under way, ``waited_s`` that in which the stage after it stood still for it:
    compute for a copy or, without a GPU, for the SSD; the link for the SSD, or for compute to free a slot."""

    bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0

    @property
    def mbps(self) -> float | None:
        """MB/s while busy; None when nothing was moved."""
        return self.bytes / self.busy_s / 1e6 if self.bytes and self.busy_s else None

    def plus(self, other: StageUse, sign: int = 1) -> StageUse:
        return StageUse(
            self.bytes + sign * other.bytes, self.busy_s + sign * other.busy_s, self.waited_s + sign * other.waited_s
        )


class StageClock:
    """Books the engine's counters to phases: :meth:`book` gives everything since the last call to ``phase``."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._last: dict[str, StageUse] = {}
        self._booked_at = time.perf_counter()
        self.phases: dict[str, dict[str, StageUse]] = {}
        self.seconds: dict[str, float] = {}
        """Length of each phase."""

    def book(self, phase: str) -> None:
        totals, waits, now = self._engine.stage_totals(), self._engine.ledger.waits(), time.perf_counter()
        booked = self.phases.setdefault(phase, {})
        for stage, (nbytes, busy_s) in totals.items():
            use = StageUse(nbytes, busy_s, waits.get(stage, 0.0))
            booked[stage] = booked.get(stage, StageUse()).plus(use.plus(self._last.get(stage, StageUse()), -1))
            self._last[stage] = use
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._booked_at
        self._booked_at = now

    def waited(self, phase: str) -> dict[str, float]:
        """Stage -> share of the phase's time in which it was waited for. A wait counts when it is over, so the first one of a phase may
        have begun in the one before; 1 at most."""
        stages, seconds = self.phases.get(phase, {}), self.seconds.get(phase, 0.0)
        return {stage: min(1.0, use.waited_s / seconds) if seconds else 0.0 for stage, use in stages.items()}

    def as_json(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Phase -> stage -> bytes, seconds, MB/s."""
        return {
            phase: {stage: {"bytes": use.bytes, "busy_s": use.busy_s, "mbps": use.mbps} for stage, use in stages.items()}
            for phase, stages in self.phases.items()
        }
