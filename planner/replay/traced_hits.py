"""What a trace tells of a model's experts, or what is known of a policy: hits, what a second tier adds, and what is foreseen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.config_schema import MoeConfig
from penstock.planner.contract.decided.decisions import ExpertPolicyName, ExpertSlots
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.given.model import Experts, ModelSpec

if TYPE_CHECKING:
    from penstock.planner.contract.experts.routing import Trace


@dataclass(frozen=True)
class Traced:
    """``model`` with the hits of a policy, and ``source``, where they come from in words: None where the known figures stand."""

    model: ModelSpec
    source: str | None = None
    trace: Trace | None = None

    def in_slots(self, slots: ExpertSlots | None) -> ModelSpec:
        """The model with what the trace says of both tiers of a plan, acted out in its own ``slots``: up to 2 s."""
        experts = self.model.experts
        if self.trace is None or experts is None or slots is None:
            return self.model
        from penstock.planner.replay.two_tiers import second_tier_of

        return replace(self.model, experts=replace(experts, second_tier=second_tier_of(experts, self.trace, slots)))


def with_hits(model: ModelSpec, cfg: MoeConfig) -> Traced:
    """``model`` with the hits that ``cfg.policy`` has on ``cfg.traces``, or the known ones where none is given. Replays the trace once, for
    a policy that asks routers beforehand twice, and acts its beginning out in two tiers, which takes up to 3 s more. Raises UserError for
    a trace of another model."""
    experts, policy = model.experts, cfg.policy or ExpertPolicyName.mix
    if experts is None:
        if cfg.traces is not None:
            raise UserError(f"moe.traces={cfg.traces}: {model.name} has no routed experts; drop it, or choose a MoE model")
        return Traced(model)
    if cfg.traces is None:
        known = replace(experts, hit_rates=default_hit_rates(experts.count, experts.top_k, policy))
        return Traced(replace(model, experts=known))
    from penstock.planner.replay.replayed import hit_curve
    from penstock.planner.replay.two_tiers import second_tier

    path = Path(cfg.traces)
    trace = _read(path, model.name, experts, policy)
    rates = tuple(min(1.0, rate) for rate in hit_curve(trace, policy))
    told = replace(experts, hit_rates=rates, foreseen=0.0 if cfg.prefetch == 0 else _foreseen(trace, policy))
    told = replace(told, second_tier=second_tier(told, trace, policy))
    return Traced(replace(model, experts=told), f"{policy} on {path.name}", trace)


def _foreseen(trace: Trace, policy: ExpertPolicyName) -> float:
    """See :class:`Experts`; with slots for half of the experts, of which no policy's foresight depends much. 0 also where no
    farther layer's router is asked: what is known one layer ahead hides a part of a copy at most."""
    from penstock.planner.contract.experts.expert_cache import LIKELY
    from penstock.planner.contract.experts.policies import AheadScores, make_expert_policy
    from penstock.planner.contract.experts.policies.far import reach
    from penstock.planner.replay.replayed import Prefetch, replay

    needs = make_expert_policy(policy, 1, trace.count, trace.top_k).needs_ahead
    if needs is not AheadScores.router or reach(trace.layers, trace.count) < 2:
        return 0.0
    (found,) = replay(trace, policy, [trace.count // 2], Prefetch(trace.top_k, LIKELY)).fetched
    return found.right / found.missed if found.missed else 0.0


def _read(path: Path, name: str, experts: Experts, policy: ExpertPolicyName) -> Trace:
    from penstock.planner.contract.experts.policies import make_expert_policy
    from penstock.planner.contract.experts.routing_files import read_trace

    try:
        trace = read_trace(path, experts.count)
    except UserError as error:  # which names its key as `planner replay` has it
        raise UserError(f"moe.{error}") from error
    if trace.top_k != experts.top_k:
        raise UserError(
            f"moe.traces={path}: its tokens use {trace.top_k} experts a layer, those of {name} {experts.top_k}; name a trace of this model"
        )
    if not trace.decode.any():
        raise UserError(f"moe.traces={path}: has no decode steps, which tell of hits; name a trace of a generation")
    needs = make_expert_policy(policy, 1, experts.count, experts.top_k).needs_ahead
    if needs is not None and trace.layers > 1 and needs not in trace.scores:
        raise UserError(f"moe.policy={policy}: {path} has no scores of hidden states, which it needs; choose another policy or trace")
    return trace
