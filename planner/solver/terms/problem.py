"""What one integer program is about, and the question that several of them answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.planner.contract.decided.decisions import CachePolicy, ResidentForms
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload


@dataclass(frozen=True)
class Problem:
    """What one program is about. ``policy``, ``batch`` and ``forms`` are fixed in it."""

    hardware: HardwareProfile
    model: ModelSpec
    workload: Workload
    force: Force
    policy: CachePolicy
    batch: int
    forms: ResidentForms = ResidentForms()


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
