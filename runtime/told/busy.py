"""For what share of a phase each resource was busy."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.planner.common.measures import GB
from penstock.planner.common.timeline.spans import COMPUTE, CPU, D2H, H2D, SSD, SSD_WRITE
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.runtime.told.stage_clock import StageUse

SAID = {"card": "card", "link": "link", "cpu": "CPU", "bus": "bus", "ssd": "SSD"}
"""Resource -> its name in a line."""
ON_THE_BUS = (H2D, D2H, CPU, SSD, SSD_WRITE)
"""Stages whose bytes pass the host's memory bus once."""


def busy_shares(stages: Mapping[str, StageUse], seconds: float, hardware: HardwareProfile) -> dict[str, float | None]:
    """Resource -> the share of ``seconds`` in which it had work, at most 1. Without a card the CPU computes.

    ``bus``: bytes over what the bus carries in that time. None where its rate is not known, or the CPU's bytes are not counted.
    """

    def share(busy_s: float) -> float:
        return min(1.0, busy_s / seconds) if seconds else 0.0

    def of(*names: str) -> float:
        return share(max(stages.get(name, StageUse()).busy_s for name in names))

    drive = {"ssd": of(SSD, SSD_WRITE)}
    if hardware.gpu is None:
        return {"cpu": of(COMPUTE), "bus": None, **drive}
    passed = sum(stages.get(name, StageUse()).bytes for name in ON_THE_BUS) / GB
    bus = share(passed / hardware.dram_bus_gbps) if hardware.dram_bus_gbps else None
    return {"card": of(COMPUTE), "link": of(H2D, D2H), "cpu": of(CPU), "bus": bus, **drive}


def busy_line(phase: str, shares: Mapping[str, float | None]) -> str:
    """As a run ends with it: those that did anything."""
    told = ", ".join(f"{SAID[name]} {share:.1%}" for name, share in shares.items() if share)
    return f"{phase}: busy {told or 'nothing'} of the time"
