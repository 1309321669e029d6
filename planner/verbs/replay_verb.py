"""`planner replay`: routings acted out under expert policies, as tables, JSON and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from penstock.planner.asked.verb_schema import ReplayConfig
from penstock.planner.common.bars import make_bar
from penstock.planner.common.console import make_console
from penstock.planner.common.errors import UserError, nearest
from penstock.planner.common.output import check_apart, write_at_once, write_json
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.planner.contract.config.resolve import model_from
from penstock.planner.contract.decided.decisions import ExpertPolicyName
from penstock.planner.contract.experts.policies import AheadScores, make_expert_policy
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.planner.contract.experts.routing import Routings
from penstock.planner.contract.experts.routing_files import read_routings
from penstock.planner.contract.experts.routing_lines import SCORES
from penstock.planner.contract.given.model import Experts
from penstock.planner.replay.comparison import Comparison, compare, document
from penstock.planner.replay.replay_picture import check_picture, draw_comparison
from penstock.planner.replay.replay_table import print_comparison

MOST_SLOTS = 15
"""Numbers of slots that are compared when none are asked for."""


def replay_verb(cfg: ReplayConfig) -> None:
    """Compare the policies and tell; the last line is one JSON document. Files are written when all is done."""
    names = _named(cfg.policy)
    check_apart({"routings": cfg.routings, "out": cfg.out, "plot": cfg.plot})
    if cfg.plot is not None:
        check_picture(user_path(cfg.plot))
    experts = _experts(cfg.model) if cfg.model is not None else None
    with make_bar(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("reading the routings", total=1.0)
        routings = read_routings(user_path(cfg.routings), _count(cfg, experts), lambda share: bar.update(task, completed=share))
        _check_model(routings, experts, cfg)
        routings = routings.all_decoded() if cfg.score_prompts else routings
        if not routings.decode.any():
            raise UserError(f"routings={cfg.routings}: holds no decode step; set score_prompts=true to score its prompts")
        left_out = _unfed(routings, names or list(ExpertPolicyName))
        if names and left_out:
            raise UserError(f"policy={next(iter(left_out))}: {next(iter(left_out.values()))}; choose another policy or record them")
        names = [name for name in names or ExpertPolicyName if name not in left_out]
        slots, prefetch = _slots(cfg.slots, routings), _prefetch(cfg, routings)
        tokens = int(routings.decode.sum())
        bar.update(task, description="replaying", completed=0, total=tokens * (len({ExpertPolicyName.lru, *names}) + 1))
        found = compare(routings, names, slots, prefetch, lambda done: bar.advance(task, done))
    _tell(found, cfg, experts, left_out, routings.dropped)


def _tell(found: Comparison, cfg: ReplayConfig, experts: Experts | None, left_out: Mapping[ExpertPolicyName, str], dropped: int) -> None:
    console, expert_bytes = make_console(), experts.expert_bytes if experts else None
    print_comparison(found, expert_bytes, console)
    for name, why in left_out.items():
        console.print(f"note: {name} is left out: {why}", style="dim", soft_wrap=True)
    if dropped:
        console.print(f"note: {dropped} tokens at a prompt's end lack lines of some layers and are left out", style="dim", soft_wrap=True)
    result = {
        "routings": cfg.routings,
        "dropped_tokens": dropped,
        **document(found, expert_bytes),
        "left_out": {name.value: why for name, why in left_out.items()},
    }
    if cfg.out is not None:
        write_json(user_path(cfg.out), "out", result)
    if cfg.plot is not None:
        write_at_once(user_path(cfg.plot), "plot", lambda temporary: draw_comparison(found, user_path(cfg.routings).name, temporary))
    cfg.close(result)


def _named(words: Sequence[str]) -> list[ExpertPolicyName]:
    choices = [name.value for name in ExpertPolicyName]
    for word in words:
        if word not in choices:
            raise UserError(f"policy={word}: no such policy; choose of {', '.join(choices)}{nearest(word, choices)}")
    return [ExpertPolicyName(word) for word in dict.fromkeys(words)]


def _experts(model: ModelConfig) -> Experts:
    spec = model_from(model)
    if spec.experts is None:
        raise UserError(f"model={spec.name}: has no experts, so no routings can be of it; choose the model that they are of")
    return spec.experts


def _count(cfg: ReplayConfig, experts: Experts | None) -> int | None:
    if cfg.experts is not None and cfg.experts < 1:
        raise UserError(f"experts={cfg.experts}: must be 1 or more, or null for as many as the routings name")
    if experts is not None and cfg.experts not in (None, experts.count):
        raise UserError(f"experts={cfg.experts}: the model has {experts.count} in a layer; leave one of experts= and model= out")
    return experts.count if experts else cfg.experts


def _check_model(routings: Routings, experts: Experts | None, cfg: ReplayConfig) -> None:
    if experts is None:
        return
    for what, recorded, modelled in (
        ("MoE layers", routings.layers, len(experts.layers)),
        ("experts a token", routings.top_k, experts.top_k),
    ):
        if recorded != modelled:
            raise UserError(f"routings={cfg.routings}: has {recorded} {what}, the model {modelled}; choose the model that they are of")


def _unfed(routings: Routings, names: Sequence[ExpertPolicyName]) -> dict[ExpertPolicyName, str]:
    """The policies among ``names`` that need scores which the routings lack, and why."""
    needs = {name: make_expert_policy(name, 1, routings.count, routings.top_k).needs_ahead for name in names}
    return {
        name: _lacking(need) for name, need in needs.items() if need is not None and routings.layers > 1 and need not in routings.scores
    }


def _lacking(need: AheadScores) -> str:
    return f'the routings have no "{SCORES[need]}", scores of hidden states'


def _slots(asked: Sequence[int], routings: Routings) -> list[int]:
    if routings.count < 2:
        raise UserError("experts=1: there is nothing to choose from; replay routings of a model with several experts a layer")
    for n in asked:
        if not 1 <= n <= routings.count:
            raise UserError(f"slots={n}: must be from 1 to {routings.count}, the experts of a layer")
    every = range(1, routings.count)
    return sorted(set(asked) or {every[i] for i in np.linspace(0, len(every) - 1, min(MOST_SLOTS, len(every))).round().astype(int)})


def _prefetch(cfg: ReplayConfig, routings: Routings) -> Prefetch:
    most = routings.top_k if cfg.prefetch is None else cfg.prefetch
    if not 0 <= most <= routings.count:
        raise UserError(f"prefetch={most}: must be from 0 to {routings.count}, the experts of a layer, or null for as many as a token uses")
    if not 0 <= cfg.least_chance < 1:
        raise UserError(f"least_chance={cfg.least_chance}: must be at least 0 and below 1; it is a probability")
    return Prefetch(most, cfg.least_chance)
