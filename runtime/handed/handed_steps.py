"""Which units a pass streams, where the CPU computes some of a step's: the weight stream of prompts, and that of steps."""

from __future__ import annotations

from penstock.planner.contract.decided.host_units import HostUnits
from penstock.runtime.handed.launched_units import LaunchedUnits
from penstock.runtime.handed.ring_turns import RingTurns
from penstock.runtime.model.binding import WeightStream
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.moving.ring import RingStats, VramRing
from penstock.runtime.moving.stream import RingStream
from penstock.runtime.recorded.heard_stream import HeardStream


class HandedSteps:
    """Steps of no more tokens than ``decided`` has rows, drafts with them, hand ``units`` over, and stream by ``steps``, whose ring is
    ``step_ring``. All other passes stream by ``prompts``, through ``ring``. Costs two threads."""

    def __init__(
        self,
        decided: HostUnits,
        units: LaunchedUnits,
        prompts: RingStream,
        ring: VramRing,
        steps: RingStream,
        step_ring: VramRing,
        turns: RingTurns,
    ):
        self._decided, self._units, self._turns = decided, units, turns
        self._prompts, self._ring, self._steps, self._step_ring = prompts, ring, steps, step_ring
        self._step_stream = HeardStream(steps, units.entered)
        self.steps = 0
        """That handed units over."""

    def stream_of(self, step: Step) -> WeightStream:
        """``step`` comes next -> what feeds it."""
        prompts = any(row.kind is RowKind.prompt for row in step.rows)
        handed = not prompts and self._decided.compute(step.tokens) and self._units.refused is None
        self._units.begin_pass(handed)
        self._turns.take(self._step_ring if handed else self._ring)
        self.steps += handed
        return self._step_stream if handed else self._prompts

    @property
    def stats(self) -> RingStats:
        """Of the ring of steps."""
        return self._step_ring.stats

    def rest(self) -> None:
        """A rehearsal comes next, which hands nothing over."""
        self._units.begin_pass(False, real=False)

    def facts(self) -> dict[str, object]:
        """For the report: steps that handed units over, and why none does."""
        return {"steps": self.steps, "refused": self._units.refused}

    def settle(self) -> None:
        """Book all kernels of steps that have finished; never blocks."""
        self._steps.settle()

    def close(self) -> None:
        """End the ring of steps; units are no longer the CPU's. A second call does nothing."""
        self._units.close()
        self._step_ring.close()
