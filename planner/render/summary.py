"""A plan as the JSON line that ends a verb's output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.tier_fill import fills


def summary(plan: Plan, out: str) -> dict[str, object]:
    """The JSON line: what was asked, decided and promised. What was assumed of the machine is in the plan file."""
    p, d = plan.prediction, plan.decisions
    return {
        "plan": out,
        "hardware": plan.hardware.name,
        "model": plan.model.name,
        "workload": plan.workload.name,
        "batch": d.batch,
        "policy": str(d.weights.policy),
        "layers": _layers(d, plan),
        "predicted": _short({name: value for name, value in vars(p).items() if not isinstance(value, dict)}),
        "nine_in_ten": {name: [float(f"{s:.6g}") for s in ends] for name, ends in vars(plan.intervals).items()},
        "stages": {phase: _short(getattr(p, f"{phase}_stages")) for phase in ("prefill", "decode")},
        "decided": asdict(d),
        "tiers": {fill.tier: {"capacity_bytes": fill.capacity_bytes, "items": fill.items} for fill in fills(plan)},
        "notes": list(plan.notes),
    }


def _short(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Six figures are enough."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in figures.items()}


def _layers(decisions: Decisions, plan: Plan) -> dict[str, int]:
    placement = plan.placement
    through, from_ssd = len(placement.dram_layers), len(placement.ssd_layers)
    return {"vram": plan.model.layers - through, "dram": through - from_ssd, "ssd": from_ssd}
