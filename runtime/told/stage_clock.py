"""What each stage did in each phase of a run: bytes, busy seconds, rate, and for how long it was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.runtime.engine.engine import Engine


@dataclass(frozen=True)
class StageUse:
    """``busy_s``: seconds in which the stage had work in flight. ``waited_s``: seconds in which the next stage waited for it. Compute waits
    for a copy or, without a GPU, for the SSD. The link waits for the SSD, or for compute to free a slot."""

    bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0

    @property
    def mbps(self) -> float | None:
        """MB/s while busy; None when nothing was moved."""
        return self.bytes / self.busy_s / 1e6 if self.bytes and self.busy_s else None

    def plus(self, other: StageUse, sign: int = 1) -> StageUse:
        return StageUse(self.bytes + sign * other.bytes, self.busy_s + sign * other.busy_s, self.waited_s + sign * other.waited_s)


class Booked:
    """Uses by phase and name, from counters that only grow."""

    def __init__(self) -> None:
        self.phases: dict[str, dict[str, StageUse]] = {}
        self.first: dict[str, dict[str, StageUse]] = {}
        """What each phase was given at first."""
        self._last: dict[str, StageUse] = {}

    def book(self, phase: str, counters: Mapping[str, StageUse]) -> None:
        """``phase`` gets what was added since the last call."""
        booked = self.phases.setdefault(phase, {})
        for name, use in counters.items():
            booked[name] = booked.get(name, StageUse()).plus(use.plus(self._last.get(name, StageUse()), -1))
            self._last[name] = use
        self.first.setdefault(phase, dict(booked))


class StageClock:
    """Books the engine's counters to phases: :meth:`book` gives everything since the last call to ``phase``, and has ``also`` do so."""

    def __init__(self, engine: Engine, also: Callable[[str], None] = lambda phase: None):
        self._engine, self._also = engine, also
        self._stages, self._tracks = Booked(), Booked()
        self._booked_at = time.perf_counter()
        self.phases, self.first = self._stages.phases, self._stages.first
        self.tracks = self._tracks.phases
        """The same by track, so that on the link weights (``h2d``) and KV (``h2d.kv``) are apart."""
        self.seconds: dict[str, float] = {}
        """Length of each phase."""
        self.step_bytes: list[Mapping[str, int]] = []
        """What each stage moved in each decode step, those that moved anything."""
        self._moved: Mapping[str, int] = {}

    def book(self, phase: str) -> None:
        self._also(phase)
        totals, waits, now = self._engine.stage_totals(), self._engine.ledger.waits(), time.perf_counter()
        self._stages.book(phase, {stage: StageUse(*use, waits.get(stage, 0.0)) for stage, use in totals.items()})
        self._tracks.book(phase, {track: StageUse(*use) for track, use in self._engine.track_totals().items()})
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._booked_at
        self._booked_at = now
        self._moved = {stage: nbytes for stage, (nbytes, _) in totals.items()}

    def step(self) -> None:
        """A decode step is over: one more entry in ``step_bytes``, of copies that the device has reported as ended."""
        moved = {stage: nbytes for stage, (nbytes, _) in self._engine.stage_totals().items()}
        self.step_bytes.append({stage: n - self._moved.get(stage, 0) for stage, n in moved.items() if n != self._moved.get(stage, 0)})
        self._moved = moved

    def waited(self, phase: str) -> dict[str, float]:
        """Stage -> share of the phase's time in which it was waited for. A wait counts when it is over, so the first one of a phase may
        have begun in the one before; 1 at most."""
        stages, seconds = self.phases.get(phase, {}), self.seconds.get(phase, 0.0)
        return {stage: min(1.0, use.waited_s / seconds) if seconds else 0.0 for stage, use in stages.items()}

    def as_json(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Phase -> stage, or track that is only a part of one -> bytes, seconds, MB/s."""
        named = {phase: self.tracks[phase] | stages for phase, stages in self.phases.items()}
        return {
            phase: {name: {"bytes": use.bytes, "busy_s": use.busy_s, "mbps": use.mbps} for name, use in uses.items()}
            for phase, uses in named.items()
        }
