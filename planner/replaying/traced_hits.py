"""A model's curve of hits from a trace, or the known one of a policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from planner.command.schema import MoeConfig
from planner.decisions import ExpertPolicyName
from planner.errors import UserError
from planner.model import Experts, ModelSpec
from planner.moe.hits import default_hit_rates


def with_hits(model: ModelSpec, cfg: MoeConfig) -> tuple[ModelSpec, str | None]:
    """``model`` with the hits that ``cfg.policy`` has on ``cfg.traces``, and where they come from in words: None where no trace is given
    and the known figures stand. Replays the trace once. Raises UserError for a trace of another model."""
    experts, policy = model.experts, cfg.policy or ExpertPolicyName.mix
    if experts is None:
        if cfg.traces is not None:
            raise UserError(f"moe.traces={cfg.traces}: {model.name} has no routed experts; drop it, or choose a MoE model")
        return model, None
    if cfg.traces is None:
        return _with(model, experts, default_hit_rates(experts.count, experts.top_k, policy)), None
    path = Path(cfg.traces)
    return _with(model, experts, _traced(path, model.name, experts, policy)), f"{policy} on {path.name}"


def _with(model: ModelSpec, experts: Experts, hit_rates: tuple[float, ...]) -> ModelSpec:
    return replace(model, experts=replace(experts, hit_rates=hit_rates))


def _traced(path: Path, name: str, experts: Experts, policy: ExpertPolicyName) -> tuple[float, ...]:
    from planner.moe.traces import read_trace
    from planner.policy.experts import make_expert_policy
    from planner.replaying.replay import hit_curve

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
    return tuple(min(1.0, rate) for rate in hit_curve(trace, policy))
