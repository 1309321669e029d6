"""Cache policies as pure state machines, shared by the simulator and the runtime."""

from penstock.planner.contract.policy.base import Evict, LayerPolicy, Load, Step
from penstock.planner.contract.policy.layer_choice import make_policy
from penstock.planner.contract.policy.pinned import PinnedPolicy
from penstock.planner.contract.policy.rolling import RollingPolicy

__all__ = ["Evict", "LayerPolicy", "Load", "PinnedPolicy", "RollingPolicy", "Step", "make_policy"]
