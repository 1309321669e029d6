"""The expert policy that a plan names."""

from __future__ import annotations

from planner.decisions import ExpertPolicyName
from planner.policy.experts.base import ExpertPolicy
from planner.policy.experts.gating import GatingPolicy
from planner.policy.experts.lfu import LfuPolicy
from planner.policy.experts.lookahead import LookaheadPolicy
from planner.policy.experts.lru import LruPolicy
from planner.policy.experts.markov import MarkovPolicy
from planner.policy.experts.mix import MixPolicy
from planner.policy.experts.static import StaticPolicy
from planner.policy.experts.trajectory import TrajectoryPolicy

_POLICIES = {
    ExpertPolicyName.lru: LruPolicy,
    ExpertPolicyName.lfu: LfuPolicy,
    ExpertPolicyName.static: StaticPolicy,
    ExpertPolicyName.gating: GatingPolicy,
    ExpertPolicyName.markov: MarkovPolicy,
    ExpertPolicyName.trajectory: TrajectoryPolicy,
    ExpertPolicyName.lookahead: LookaheadPolicy,
    ExpertPolicyName.mix: MixPolicy,
}


def make_expert_policy(name: ExpertPolicyName, layers: int, count: int, top_k: int) -> ExpertPolicy:
    """A fresh policy for ``layers`` MoE layers of ``count`` experts, of which a token uses ``top_k``."""
    return _POLICIES[name](layers, count, top_k)
