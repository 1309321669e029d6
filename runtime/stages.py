"""What each stage did in each phase of a run: bytes, busy seconds, rate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from runtime.engine import Engine


@dataclass(frozen=True)
class StageUse:
    """``busy_s`` is the time in which the stage had work under way."""

    bytes: int = 0
    busy_s: float = 0.0

    @property
    def mbps(self) -> float | None:
        """MB/s while busy; None when nothing was moved."""
        return self.bytes / self.busy_s / 1e6 if self.bytes and self.busy_s else None

    def plus(self, other: StageUse, sign: int = 1) -> StageUse:
        return StageUse(self.bytes + sign * other.bytes, self.busy_s + sign * other.busy_s)


class StageClock:
    """Books the engine's counters to phases: :meth:`book` gives everything since the last call to ``phase``."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._last: dict[str, StageUse] = {}
        self.phases: dict[str, dict[str, StageUse]] = {}

    def book(self, phase: str) -> None:
        now = self._engine.stage_totals()
        booked = self.phases.setdefault(phase, {})
        for stage, (nbytes, busy_s) in now.items():
            use = StageUse(nbytes, busy_s)
            booked[stage] = booked.get(stage, StageUse()).plus(use.plus(self._last.get(stage, StageUse()), -1))
            self._last[stage] = use

    def as_json(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Phase -> stage -> bytes, seconds, MB/s."""
        return {
            phase: {stage: {**asdict(use), "mbps": use.mbps} for stage, use in stages.items()} for phase, stages in self.phases.items()
        }
