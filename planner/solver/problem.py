"""What one integer program is about, and the question that several of them answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.decisions import CachePolicy
from planner.force import Force
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.workload import Workload


@dataclass(frozen=True)
class Problem:
    """What one program is about. ``policy`` and ``batch`` are fixed in it."""

    hardware: HardwareProfile
    model: ModelSpec
    workload: Workload
    force: Force
    policy: CachePolicy
    batch: int


@dataclass(frozen=True)
class Question:
    """What is asked of the planner: which decisions are best here."""

    hardware: HardwareProfile
    model: ModelSpec
    workload: Workload
    force: Force = Force()

    def on(self, hardware: HardwareProfile) -> Question:
        """The same on another machine."""
        return replace(self, hardware=hardware)
