"""Cache policies as pure state machines, shared by the simulator and the runtime."""

from planner.policy.base import Evict, LayerPolicy, Load, Step
from planner.policy.choice import make_policy
from planner.policy.pinned import PinnedPolicy
from planner.policy.rolling import RollingPolicy

__all__ = ["Evict", "LayerPolicy", "Load", "PinnedPolicy", "RollingPolicy", "Step", "make_policy"]
