"""A model that drafts: which one is asked for, and the plan of what it leaves of each memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.planner.contract.checkpoint.draft_checkpoint import drafter_spec, heads_spec
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.speculating import (
    DEFAULT_ACCEPTANCE,
    MOST_DRAFTS,
    Drafter,
    Speculate,
    Speculation,
    modelled,
)
from penstock.planner.contract.given.formats import KNOWN_FORMATS
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.rank_predictions import predict_ranks
from penstock.planner.contract.prices.memory_law import drafter_bytes, recorded_shapes, shapes_wanted
from penstock.planner.contract.prices.sizes import recorded_bytes
from penstock.planner.contract.published.model_source import further_heads_of

Solve = Callable[[int, int], Plan]
"""The same question where so many bytes of VRAM and of DRAM are taken; of several ranks, the first one's."""
COPY = "INT4-128"
"""Format of `runtime pack format=int4`."""


def drafter_asked(asked: Speculate, draft: str | None, model: ModelSpec, published: Mapping[str, Any] | None = None) -> Speculation | None:
    """The drafter with weights that ``speculate=asked draft=draft`` names for ``model``; None where none is named. ``self`` without a
    directory is the copy that `runtime pack format=int4` would make; ``auto`` without one the model's own further heads, where it has some.
    ``published`` is the config of a model without a checkpoint. UserError where there is none, or where it cannot draft."""
    if draft is not None:
        return modelled(Speculation(), asked, drafter_spec(draft, model), model)
    if asked is Speculate.auto:
        try:
            return drafter_asked(Speculate.mtp, None, model, published)
        except UserError:
            return None
    if asked is Speculate.draft:
        raise UserError(f"speculate=draft: no model is given; set draft=DIR, a smaller model with the tokens of {model.name}")
    if asked is Speculate.mtp:
        known = None if model.checkpoint is not None else further_heads_of(published or {}, model)
        return Speculation(Drafter.mtp, 0, DEFAULT_ACCEPTANCE[Drafter.mtp], known or heads_spec(model))
    if asked is not Speculate.self:
        return None
    if model.coded:
        raise UserError(f"speculate=self: {model.name} is stored in few bits already; set draft=DIR, a smaller copy or model of its tokens")
    copy = replace(model.stored_as(KNOWN_FORMATS[COPY]), name=f"{model.name} in 4 bits")
    return Speculation(Drafter.self, 0, DEFAULT_ACCEPTANCE[Drafter.self], copy)


def beside_drafter(plan: Plan, drafter: Speculation, solve: Solve) -> Plan:
    """``plan``, solved again with what ``drafter`` leaves of VRAM and DRAM, and with the drafter. Costs one solve, and another one where
    its K and V take more beside the new decisions. UserError where no plan is left."""
    taken: dict[Tier, int] = {}
    made = plan
    while True:
        needed = beside_bytes(replace(made, hardware=plan.hardware), drafter)
        if taken and all(needed[tier] <= taken[tier] for tier in needed):
            return drafted(replace(made, hardware=plan.hardware), drafter)
        taken = {tier: max(n, taken.get(tier, 0)) for tier, n in needed.items()}
        made = _solved(plan, drafter, taken, solve)


def beside_bytes(plan: Plan, drafter: Speculation) -> dict[Tier, int]:
    """What ``drafter`` takes of VRAM and of DRAM beside ``plan``, of several ranks beside the first one: with its steps that verify, of
    chains as long as can be where their length is not decided."""
    first, decided = plan.of_rank(0), replace(plan.decisions, speculation=replace(drafter, tokens=drafter.tokens or MOST_DRAFTS))
    needed = drafter_bytes(first.hardware, first.model, plan.workload, decided)
    needed[Tier.vram] += recorded_bytes(first.model, shapes_wanted(first.hardware, first.model, decided))
    return needed


def with_room(plan: Plan, solve: Solve) -> Plan:
    """``plan``, solved again where VRAM has no room for all passes that it has recorded to verify. Itself where the rest would hold no
    plan: those without room are launched kernel by kernel; where a model drafts, which has left room; and of several ranks."""
    asked = plan.hardware, plan.model, plan.workload, plan.decisions
    wanted = shapes_wanted(plan.hardware, plan.model, plan.decisions)
    if plan.ranks.count > 1 or plan.decisions.speculation.model is not None or recorded_shapes(*asked) == wanted:
        return plan
    try:
        made = solve(recorded_bytes(plan.model, wanted), 0)
    except UserError:
        return plan
    return drafted(replace(made, hardware=plan.hardware, notes=plan.notes), plan.decisions.speculation)


def _solved(plan: Plan, drafter: Speculation, taken: dict[Tier, int], solve: Solve) -> Plan:
    hardware, model = plan.of_rank(0).hardware, drafter.model
    assert model is not None
    words = f"{show_bytes(taken[Tier.vram])} of VRAM" if hardware.gpu else f"{show_bytes(taken[Tier.dram])} of DRAM"
    left = hardware.less(taken[Tier.vram], taken[Tier.dram])
    refused = f"speculate={drafter.drafter}: {model.name} takes {words}, and what it leaves holds no plan of {plan.model.name}"
    remedy = "choose a smaller drafter, or speculate=lookup"
    if min(left.dram_bytes, left.vram_bytes if hardware.gpu else 1) <= 0:
        raise UserError(f"{refused}; {remedy}")
    try:
        return solve(taken[Tier.vram], taken[Tier.dram])
    except UserError as error:
        raise UserError(f"{refused} ({str(error).partition(';')[0]}); {remedy}") from error


def drafted(plan: Plan, speculation: Speculation) -> Plan:
    """``plan`` with ``speculation``, of all its ranks, predicted anew."""
    first = replace(plan.decisions, speculation=speculation)
    others = [replace(decisions, speculation=speculation.beside) for decisions in plan.ranks.others]
    predicted = predict_ranks(plan.hardware, plan.model, plan.workload, (first, *others), plan.dealing)
    return replace(plan, decisions=first, ranks=replace(plan.ranks, others=tuple(others)), prediction=predicted)
