"""What the simulation of several ranks found: of all together, and of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from penstock.planner.common.timeline.spans import Timeline
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Resource
from penstock.planner.simulate.lanes.lanes import LINKS
from penstock.planner.simulate.outcome import PHASES, Told


@dataclass(frozen=True)
class DealtTold(Told):
    """Seconds are those of all ranks together, bytes and waits are sums, and so are a busy share's seconds over those of all. What else
    is said of one rank is the first one's."""

    whole: Plan | None = None
    others: tuple[Told, ...] = ()
    """Of the ranks behind the first one."""

    @property
    def plan(self) -> Plan:
        return self.acted.plan if self.whole is None else self.whole

    @property
    def each(self) -> tuple[Told, ...]:
        """Of every rank alone."""
        return Told(self.acted, self.bent), *self.others

    def bytes(self, phase: str, stage: Resource) -> int:
        return sum(told.bytes(phase, stage) for told in self.each)

    def busy(self, phase: str, track: str) -> float:
        return sum(told.busy(phase, track) for told in self.each) / len(self.each)

    def waits(self) -> dict[str, tuple[int, float]]:
        found: dict[str, tuple[int, float]] = {}
        for told in self.each:
            for key, (count, waited_s) in told.waits().items():
                times, seconds = found.get(key, (0, 0.0))
                found[key] = times + count, seconds + waited_s
        return found

    def timeline(self) -> Timeline:
        """With the spans of each rank."""
        return replace(super().timeline(), others=tuple(told.acted.record.spans for told in self.others))

    def document(self) -> dict[str, Any]:
        """With a row for each rank."""
        rows = [
            {
                "rank": rank,
                "busy": {phase: {t: float(f"{share:.6g}") for t in LINKS if (share := told.busy(phase, t))} for phase in PHASES},
                "waits": {key: {"times": times, "seconds": float(f"{waited_s:.6g}")} for key, (times, waited_s) in told.waits().items()},
                "ssd_bytes": told.read_bytes,
            }
            for rank, told in enumerate(self.each)
        ]
        return super().document() | {"ranks": rows}
