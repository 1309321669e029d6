"""The expert policy that a plan names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies.base import ExpertPolicy
from penstock.planner.contract.experts.policies.gating import GatingPolicy
from penstock.planner.contract.experts.policies.lfu import LfuPolicy
from penstock.planner.contract.experts.policies.lookahead import LookaheadPolicy
from penstock.planner.contract.experts.policies.lru import LruPolicy
from penstock.planner.contract.experts.policies.markov import MarkovPolicy
from penstock.planner.contract.experts.policies.mix import MixPolicy
from penstock.planner.contract.experts.policies.static import StaticPolicy
from penstock.planner.contract.experts.policies.trajectory import TrajectoryPolicy

MOST_PAIRS = 2**25
"""Of experts of a layer, over all layers: some 1 GB of a policy's memory. A model of 61 layers with 384 experts has 2**23."""
_POLICIES: Mapping[ExpertPolicyName, Callable[[int, int, int], ExpertPolicy]] = {
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
    """A fresh policy for ``layers`` MoE layers of ``count`` experts, of which a token uses ``top_k``. UserError for more pairs of experts
    than any model has: policies count which follows which."""
    if layers * count * count > MOST_PAIRS:
        raise UserError(f"{layers} layers of {count} experts: {layers * count * count} pairs to count, at most {MOST_PAIRS}; set experts=")
    return _POLICIES[name](layers, count, top_k)
