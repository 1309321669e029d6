"""A plan file's section ``ranks``: how many, and what those decide that differ from the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.strictly import build, convert
from penstock.planner.contract.decided.decisions import Decisions, ExpertSlots, KvPages, WeightDecisions
from penstock.planner.contract.given.dealt import ExpertShare
from penstock.planner.contract.plan.model_section import numbers_in, spans
from penstock.planner.contract.plan.plan_ranks import Ranks
from penstock.planner.contract.ranks.dealing import Dealing

MOST_RANKS = 1024
_KEYS = ("count", "layers", "share", "others")
_SECTIONS = {"weights": WeightDecisions, "kv": KvPages, "experts": ExpertSlots}


def ranks_mapping(ranks: Ranks, first: Decisions) -> dict[str, Any] | None:
    """``ranks`` as the file shows it, where the first one decides ``first``; None for one rank. :func:`ranks_from` takes it back."""
    if ranks.count == 1:
        return None
    alike: dict[Decisions, list[int]] = {}
    usual = replace(first, speculation=first.speculation.beside)
    for rank, decisions in enumerate(ranks.others, 1):
        if decisions != usual:
            alike.setdefault(decisions, []).append(rank)
    others = {
        spans(of): {name: getattr(decisions, name) for name in _SECTIONS if getattr(decisions, name) != getattr(first, name)}
        for decisions, of in alike.items()
    }
    said = {
        "layers": [*ranks.layers] or None,
        "share": None if ranks.share is ExpertShare.whole else str(ranks.share),
        "others": others or None,
    }
    return {"count": ranks.count} | {key: value for key, value in said.items() if value is not None}


def ranks_from(data: Any, first: Decisions, layers: int) -> Ranks:
    """The ranks of a plan file of a model of ``layers`` whose first one decides ``first``. UserError naming ``ranks.`` and the key."""
    if data is None:
        return Ranks()
    if not isinstance(data, Mapping) or not set(data) <= set(_KEYS) or "count" not in data:
        raise UserError(f"ranks: must be a mapping of {', '.join(_KEYS)}; write the plan again with `planner solve`")
    count = convert(int, data["count"], "ranks.count")
    if not 1 <= count <= MOST_RANKS:
        raise UserError(f"ranks.count={count}: must be 1 to {MOST_RANKS}")
    usual = replace(first, speculation=first.speculation.beside)
    decided = [usual] * (count - 1)
    others = data.get("others") or {}
    if not isinstance(others, Mapping):
        raise UserError("ranks.others: must be a mapping of ranks, such as 1-3, to what they decide")
    for named, changes in others.items():
        where = f"ranks.others.{named}"
        numbers = numbers_in(str(named), count)
        if not numbers or 0 in numbers:
            raise UserError(f"{where}: must be numbers and spans of ranks within 1 to {count - 1}")
        if not isinstance(changes, Mapping) or not set(changes) <= set(_SECTIONS):
            raise UserError(f"{where}: must be a mapping of {', '.join(_SECTIONS)}")
        built: dict[str, Any] = {
            name: None if name == "experts" and value is None else build(_SECTIONS[name], value, f"{where}.{name}")
            for name, value in changes.items()
        }
        for rank in numbers:
            decided[rank - 1] = replace(usual, **built)
    share = convert(ExpertShare, data.get("share", "whole"), "ranks.share")
    return Ranks(count, tuple(decided), _layers_from(data.get("layers"), count, layers), share)


def _layers_from(data: Any, count: int, layers: int) -> tuple[int, ...]:
    """Of each rank; none where they are dealt evenly."""
    if data is None:
        return ()
    counts = convert(tuple[int, ...], data, "ranks.layers")
    if len(counts) != count or min(counts) < 1 or sum(counts) != layers:
        raise UserError(f"ranks.layers={list(counts)}: must be {count} numbers from 1, {layers} together; leave it out to deal evenly")
    return () if Dealing(counts).is_even else counts
