"""Expert policies: which experts a tier keeps, and which it fetches ahead; shared by replay and runtime."""

from planner.policy.experts.base import AheadScores, ExpertPolicy
from planner.policy.experts.choice import make_expert_policy
from planner.policy.experts.far import FarSight

__all__ = ["AheadScores", "ExpertPolicy", "FarSight", "make_expert_policy"]
