"""Expert policies: which experts a tier keeps, and which it fetches ahead; shared by replay and runtime."""

from penstock.planner.contract.experts.policies.base import AheadScores, ExpertPolicy
from penstock.planner.contract.experts.policies.expert_choice import make_expert_policy
from penstock.planner.contract.experts.policies.far import FarSight

__all__ = ["AheadScores", "ExpertPolicy", "FarSight", "make_expert_policy"]
