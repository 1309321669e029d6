"""A plan as the JSON line that ends a verb's output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.tier_fill import fills
from penstock.planner.contract.serving.serving_forecast import forecast_of
from penstock.planner.render.rank_rows import shares
from penstock.planner.render.whereabouts import experts_in, layers_in


def summary(plan: Plan, out: str) -> dict[str, object]:
    """The JSON line: what was asked, decided and promised. ``layers`` are without routed experts; ``experts``, None for a dense model, has
    under ``ssd`` those that no memory keeps. What was assumed of the machine is in the plan file."""
    p, d, layers, experts = plan.prediction, plan.decisions, layers_in(plan), experts_in(plan)
    return {
        "plan": out,
        "hardware": plan.hardware.name,
        "model": plan.model.name,
        "workload": plan.workload.name,
        "context_tokens": plan.workload.max_tokens,
        "batch": d.batch,
        "policy": str(d.weights.policy),
        "layers": {str(tier): lies.count for tier, lies in layers.items()},
        "layer_bytes": {str(tier): lies.nbytes for tier, lies in layers.items()},
        "experts": {str(tier): lies.count for tier, lies in experts.items()} or None,
        "expert_bytes": {str(tier): lies.nbytes for tier, lies in experts.items()} or None,
        "predicted": _short({name: value for name, value in vars(p).items() if not isinstance(value, dict)}),
        "nine_in_ten": {name: [float(f"{s:.6g}") for s in ends] for name, ends in vars(plan.intervals).items()},
        "serving": forecast_of(plan).document() if plan.workload.is_served else None,
        "stages": {phase: _short(getattr(p, f"{phase}_stages")) for phase in ("prefill", "decode")},
        "decided": asdict(d),
        "ranks": [
            {
                "layers": list(one.layers),
                **{name: getattr(one, name) for name in ("device", "vram_bytes", "dram_bytes", "h2d_bytes_per_token")},
            }
            for one in shares(plan)
        ]
        or None,
        "tiers": {fill.tier: {"capacity_bytes": fill.capacity_bytes, "items": fill.items} for fill in fills(plan)},
        "notes": list(plan.notes),
    }


def _short(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Six figures are enough."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in figures.items()}
