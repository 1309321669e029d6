"""The engines that a plan can be written for."""

from __future__ import annotations

from penstock.planner.export.accelerate import ACCELERATE
from penstock.planner.export.exported import Target
from penstock.planner.export.wsm_env import ENV

TARGETS: tuple[Target, ...] = (ENV, ACCELERATE)
"""One for each of ``penstock.planner.asked.verb_schema.TargetName``."""


def find_target(name: str) -> Target:
    """The target ``name``."""
    return next(target for target in TARGETS if target.name == name)
