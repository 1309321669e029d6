"""Expert policies: which experts a tier keeps, and which it fetches ahead; shared by replay and runtime."""

from planner.policy.experts.base import AheadScores, ExpertPolicy
from planner.policy.experts.choice import make_expert_policy

__all__ = ["AheadScores", "ExpertPolicy", "make_expert_policy"]
