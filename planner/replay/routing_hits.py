"""What routings teach about a model's experts, or what is known of a policy: hits, what a second tier adds, and what is foreseen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.config.config_schema import MoeConfig
from penstock.planner.contract.decided.decisions import ExpertPolicyName, ExpertSlots
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.given.model import Experts, ModelSpec

if TYPE_CHECKING:
    from penstock.planner.contract.experts.host_split import HostSplit
    from penstock.planner.contract.experts.routing import Routings


@dataclass(frozen=True)
class RoutedModel:
    """``model`` with the hits of a policy, and ``source``, where they come from in words: None where the known figures stand."""

    model: ModelSpec
    source: str | None = None
    routings: Routings | None = None

    def in_slots(self, slots: ExpertSlots | None, split: HostSplit | None = None) -> ModelSpec:
        """The model with what the routings say of both tiers of a plan, acted out in its own ``slots``, of which the CPU computes missed
        ones by ``split``: up to 2 s."""
        experts = self.model.experts
        if self.routings is None or experts is None or slots is None:
            return self.model
        from penstock.planner.replay.two_tiers import second_tier_of

        weight = second_tier_of(experts, self.routings, slots, split)
        return replace(self.model, routers=replace(experts.routers, second_tier=weight))


def with_hits(model: ModelSpec, cfg: MoeConfig) -> RoutedModel:
    """``model`` with the hits that ``cfg.policy`` has in ``cfg.routings``, or the known ones where that is null.

    Replays the routings once, or twice for a policy that asks routers beforehand. Acts their beginning out in two tiers: up to 3 s more.
    Raises UserError for routings of another model."""
    experts, policy = model.experts, cfg.policy or ExpertPolicyName.mix
    if experts is None:
        if cfg.routings is not None:
            raise UserError(f"moe.routings={cfg.routings}: {model.name} has no routed experts; drop it, or choose a MoE model")
        return RoutedModel(model)
    if cfg.routings is None:
        known = replace(experts.routers, hit_rates=default_hit_rates(experts.count, experts.top_k, policy))
        return RoutedModel(replace(model, routers=known))
    from penstock.planner.replay.replayed import hit_curve
    from penstock.planner.replay.two_tiers import second_tier

    path = user_path(cfg.routings)
    routings = _read(path, model.name, experts, policy)
    rates = tuple(min(1.0, rate) for rate in hit_curve(routings, policy))
    told = replace(experts, hit_rates=rates, foreseen=0.0 if cfg.prefetch == 0 else _foreseen(routings, policy, cfg.least_chance))
    told = replace(told, second_tier=second_tier(told, routings, policy), alone=1.0)
    return RoutedModel(replace(model, routers=told.routers), f"{policy} on {path.name}", routings)


def _foreseen(routings: Routings, policy: ExpertPolicyName, least_chance: float | None) -> float:
    """See :class:`Experts`; with slots for half of the experts, of which no policy's foresight depends much. 0 also where no
    farther layer's router is asked: what is known one layer ahead hides a part of a copy at most."""
    from penstock.planner.contract.experts.expert_caches import LIKELY
    from penstock.planner.contract.experts.policies import AheadScores, make_expert_policy
    from penstock.planner.contract.experts.policies.far import reach
    from penstock.planner.contract.experts.prefetch import Prefetch
    from penstock.planner.replay.replayed import replay

    needs = make_expert_policy(policy, 1, routings.count, routings.top_k).needs_ahead
    if needs is not AheadScores.router or reach(routings.layers, routings.count) < 2:
        return 0.0
    ahead = Prefetch(routings.top_k, LIKELY if least_chance is None else least_chance)
    (found,) = replay(routings, policy, [routings.count // 2], ahead).fetched
    return found.right / found.missed if found.missed else 0.0


def _read(path: Path, name: str, experts: Experts, policy: ExpertPolicyName) -> Routings:
    from penstock.planner.contract.experts.policies import make_expert_policy
    from penstock.planner.contract.experts.routing_files import read_routings

    try:
        routings = read_routings(path, experts.count)
    except UserError as error:  # which names its key as `planner replay` has it
        raise UserError(f"moe.{error}") from error
    if routings.top_k != experts.top_k:
        raise UserError(
            f"moe.routings={path}: its tokens use {routings.top_k} experts a layer, those of {name} {experts.top_k}; name routings of it"
        )
    if not routings.decode.any():
        raise UserError(f"moe.routings={path}: has no decode steps, which show hits; record a run that generates")
    needs = make_expert_policy(policy, 1, experts.count, experts.top_k).needs_ahead
    if needs is not None and routings.layers > 1 and needs not in routings.scores:
        raise UserError(f"moe.policy={policy}: {path} has no scores of hidden states, which it needs; choose another policy or file")
    return routings
