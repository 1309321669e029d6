"""The rule of the experts section; what its decisions may be is declared with them."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.rules.rule import BrokenRule


def expert_rules(model: ModelSpec, d: Decisions) -> Iterator[BrokenRule]:
    if (d.experts is None) != (model.experts is None):
        allowed = "none for a dense model" if model.experts is None else "an experts section for a MoE model"
        yield BrokenRule("experts section", f"experts={d.experts}; allowed: {allowed}; solve again")
