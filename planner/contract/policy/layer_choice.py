"""The policy that a plan asks for."""

from __future__ import annotations

from penstock.planner.contract.decided.decisions import CachePolicy
from penstock.planner.contract.decided.placement import Placement
from penstock.planner.contract.policy.base import LayerPolicy
from penstock.planner.contract.policy.pinned import PinnedPolicy
from penstock.planner.contract.policy.rolling import RollingPolicy


def make_policy(placement: Placement, wrap: bool) -> LayerPolicy:
    """The plan's DRAM cache policy over the layers that pass through DRAM."""
    dram = placement.weights.dram
    layers, slots = placement.dram_layers, placement.dram_slots
    if placement.weights.policy is CachePolicy.pinned:
        return PinnedPolicy(layers, placement.resident_layers, slots, dram.prefetch_distance, wrap)
    return RollingPolicy(layers, min(dram.cap_layers, slots), slots, dram.prefetch_distance, wrap)
