"""Why no plan fits, gathered: what each capacity lacks, and what each of the cheapest changes would bring."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.solver.infeasible import SLACK_WEIGHTS, Infeasible, Mend, alternatives, capacity, raised, shortages
from penstock.planner.solver.program import Optimum, optimum
from penstock.planner.solver.terms.linear import MB
from penstock.planner.solver.terms.problem import Problem, Question


@dataclass(frozen=True)
class Shortage:
    """One capacity: what it lacks at the least, together with the others, and alone with the others as they are."""

    tier: Tier
    capacity_bytes: int
    together_bytes: int
    alone_bytes: int | None
    """None: no bytes of it alone make a plan fit."""


@dataclass(frozen=True)
class Remedy:
    """A change that makes a plan fit, and the best plan then."""

    change: str
    bytes: int
    """More memory that it takes, of all tiers."""
    found: Optimum | None


@dataclass(frozen=True)
class Impossible:
    """``refusal`` is the one line that `planner solve` refuses with."""

    problem: Problem
    refusal: str
    shortages: tuple[Shortage, ...]
    remedies: tuple[Remedy, ...]
    """The cheapest first: what takes no hardware, then by ``SLACK_WEIGHTS``."""


def explain_impossible(error: Infeasible, advance: Callable[[], None] = lambda: None) -> Impossible:
    """Costs a solve for each tier, and one or two for each change. ``advance`` is called now and then."""
    problem, rows, hardware = error.problem, [], []
    tiers = [tier for tier in Tier if tier is not Tier.vram or problem.hardware.gpu]
    for tier in tiers:
        alone = shortages(problem, (tier,))
        nbytes = None if alone is None else alone.get(tier, 0)
        rows.append(Shortage(tier, capacity(problem.hardware, tier), error.shortages.get(tier, 0), nbytes))
        if nbytes and {tier: nbytes} != error.shortages:
            hardware.append({tier: nbytes})
        advance()
    free = []
    for mend in alternatives(problem):
        free.append(_remedy(mend, 0))
        advance()
    hardware = sorted([error.shortages, *hardware], key=lambda lacks: sum(getattr(SLACK_WEIGHTS, tier) * n for tier, n in lacks.items()))
    bought = [_remedy(raised(problem, lacks), sum(lacks.values())) for lacks in hardware]
    return Impossible(problem, str(error), tuple(rows), (*free, *bought))


def _remedy(mend: Mend, nbytes: int) -> Remedy:
    p = mend.problem
    return Remedy(mend.change, nbytes, optimum(Question(p.hardware, p.model, p.workload, p.force)))


def document(impossible: Impossible) -> dict[str, Any]:
    """``impossible`` for JSON."""
    p = impossible.problem
    return {
        "feasible": False,
        "hardware": p.hardware.name,
        "model": p.model.name,
        "workload": p.workload.name,
        "why": impossible.refusal,
        "shortages": [
            {
                "tier": str(s.tier), "capacity_bytes": s.capacity_bytes, "together_bytes": s.together_bytes, "alone_bytes": s.alone_bytes,
            }
            for s in impossible.shortages
        ],
        "remedies": [
            {
                "change": r.change, "bytes": r.bytes,
                "token_s": r.found and float(f"{r.found.token_s:.6g}"), "prefill_s": r.found and float(f"{r.found.prefill_s:.6g}"),
            }
            for r in impossible.remedies
        ],
    }  # fmt: skip


def shown_gb(nbytes: int) -> str:
    """GB, rounded up to the next MB."""
    return f"{math.ceil(nbytes / MB) * MB / GB:.3f} GB"
