"""What is asked of a simulation, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.policy.layer_slots import CacheStats
from penstock.planner.simulate.lanes.events import Record
from penstock.planner.simulate.lanes.expert_tier import TierCounts

Progress = Callable[[int, int], None]
"""Called with (decode steps done, all)."""


@dataclass(frozen=True)
class Options:
    """How a plan is acted out, beside what it decides."""

    wrap_around: bool = True
    keep_spans: bool = False
    keep_log: bool = False
    skip: bool = True
    """Whether passes that would be the same as earlier ones are counted instead of acted out."""


@dataclass(frozen=True)
class Acted:
    """What came of it. ``record`` has the times; ``cache`` is what a run calls the same."""

    plan: Plan
    record: Record
    cache: CacheStats
    total_ns: int
    acted_passes: int
    """Of all passes, those that were acted out one by one."""
    experts: dict[str, TierCounts]
    """Tier -> what was found in it; empty for a dense model."""
    computed_on_cpu: int = 0
    """Experts that the CPU computed beside the card."""
