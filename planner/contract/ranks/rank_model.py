"""A rank's part of a model, as a model of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from penstock.planner.contract.given.dealt import Dealt
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import PER_LAYER, UnitKind, UnitSpec
from penstock.planner.contract.ranks.dealing import Dealing


def never_dealt(model: ModelSpec) -> str:
    """Why ``model`` cannot be dealt over ranks; empty where it can."""
    return model.kv_stays_because


def never_spilled(model: ModelSpec) -> str:
    """Why KV of running sequences stays where ``model`` computes, once it is dealt; empty where it may lie elsewhere."""
    routed = model.experts is not None or (model.dealt is not None and model.dealt.routed > 0)
    return "copies of KV hold up missed experts, for a time that nobody predicts" if routed else ""


def never_sliced(model: ModelSpec, count: int) -> str:
    """Why ``model``'s routed experts cannot lie with ``count`` ranks in slices; empty where they can."""
    experts = model.of_kind(UnitKind.expert)
    if not experts:
        return f"{model.name} has no routed experts"
    coded = next((unit for unit in experts if unit.is_coded), None)
    if coded is not None:
        return f"{model.name} stores its experts in {coded.format.name}, whose groups are not cut"
    each = math.gcd(*(unit.elements for unit in experts))
    matrices = 2 if each % (3 * model.hidden) else 3  # gate, up and down
    return f"the width of {model.name}'s experts is no multiple of {count}" if each % (matrices * model.hidden * count) else ""


@lru_cache(maxsize=256)
def model_of_rank(model: ModelSpec, dealing: Dealing, rank: int) -> ModelSpec:
    """The layers of ``rank`` with their experts, numbered from 0, and its rows of the LM head, of which no rank's is tied.

    Where the dealing says ``sliced`` a rank has a slice of all layers' experts instead, which keep the numbers of their layers and are
    not fetched ahead.
    What names the next layer's experts with a chance names those ``stride`` layers on with that chance to this power. Rank 0 alone has the
    embedding table. Small tensors that always stay (``norm``) count in proportion to layers. Of one rank it is ``model`` itself. ValueError
    for a model that is :func:`never_dealt`, or is dealt already. Kept for the next time: plans of one dealing are predicted over and over.
    """
    if dealing.count == 1:
        return model
    if model.dealt is not None or dealing.layers != model.layers:
        raise ValueError(f"{model.name} has {model.layers} layers and is dealt already" if model.dealt else f"{dealing} of {model.layers}")
    if why := never_dealt(model):
        raise ValueError(why)
    mine, rows = dealing.of(rank), dealing.vocab_rows(rank, model.vocab)
    units: list[UnitSpec] = []
    slices = dealing.slices
    for kind in PER_LAYER:
        if kind is UnitKind.expert and slices > 1:
            units += (_part(unit, rank, rank + 1, slices) for unit in model.of_kind(kind))
            continue
        units += (replace(unit, layer=dealing.local(unit.layer)) for unit in model.of_kind(kind) if unit.layer in mine)
    routers = model.routers if any(unit.kind is UnitKind.expert for unit in units) else None
    if routers is not None:
        routers = replace(routers, foreseen=routers.foreseen ** dealing.stride(rank) if slices == 1 else 0.0)
    before = sum(dealing.counts[:rank])
    units += (_part(unit, before, before + len(mine), model.layers) for unit in model.of_kind(UnitKind.norm))
    if rank == 0:
        units += model.of_kind(UnitKind.embed)
    units.append(replace(_part(model.lm_head, rows.start, rows.stop, model.vocab), kind=UnitKind.head))
    dealt = Dealt(rank, dealing.owners, model.vocab, model.tied, len(model.moe), slices)
    return replace(model, units=tuple(units), tied=False, vocab=len(rows), dealt=dealt, routers=routers)


def _part(unit: UnitSpec, first: int, last: int, parts: int) -> UnitSpec:
    """Of ``unit`` the parts from ``first`` to before ``last``, of ``parts`` equal ones: those of all together are the unit."""
    elements = [unit.elements * at // parts for at in (first, last)]
    stored = [unit.stored_bytes * at // max(1, unit.elements) for at in elements]
    return replace(unit, elements=elements[1] - elements[0], stored_bytes=stored[1] - stored[0])
