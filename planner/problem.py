"""What one integer program is about."""

from __future__ import annotations

from dataclasses import dataclass

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
