"""`runtime run replan=true`: a plan with room for what is asked, solved before any memory is taken."""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan
from penstock.runtime.asked.chat_template import find_template
from penstock.runtime.asked.order import capacity_tokens, check_fit, random_tokens, read_prompts
from penstock.runtime.asked.prompts import ids_of, read_vocabulary
from penstock.runtime.asked.run_schema import RunConfig
from penstock.runtime.asked.schedule import context_tokens
from penstock.runtime.company.cards_here import cards_missing
from penstock.runtime.company.company import seat_of_environment
from penstock.runtime.tools.solving import planner

_ANY = 2**40
"""Tokens, as if there were room for all."""


def replanned(cfg: RunConfig) -> Plan:
    """The plan that ``cfg`` names, or the same problem solved again where its prompts and replies need a longer context, or where it is for
    cards that are not here. Imports transformers to read the prompts. UserError where no plan fits."""
    plan, checkpoint = check_fit(cfg, read_plan(user_path(cfg.plan)))
    need, missing = _needed_tokens(cfg, plan, checkpoint), cards_missing(plan, seat_of_environment() is not None)
    changed = [f"context_tokens={need}"] if need > capacity_tokens(plan, 1) else []
    changed += [] if missing is None else [f"devices=[{','.join(map(str, range(missing[1])))}]"]
    if not changed:
        return plan
    with tempfile.TemporaryDirectory(prefix="penstock-replan-") as scratch:
        out = Path(scratch, "plan.yaml")
        planner("replan", f"plan={cfg.plan}", *changed, f"out={out}")
        return read_plan(out)


def _needed_tokens(cfg: RunConfig, plan: Plan, checkpoint: Path) -> int:
    """Of the longest sequence, at its end."""
    usual = plan.workload.new_tokens if cfg.max_new_tokens is None else cfg.max_new_tokens
    asked = read_prompts(cfg, plan, usual, _ANY)
    if asked is None:
        return random_tokens(cfg, plan) + usual
    vocabulary = read_vocabulary(checkpoint, plan.model.vocab)
    prompts, limits = ids_of(asked, vocabulary, find_template(vocabulary.tokenizer, cfg.template)), [r.max_new_tokens for r in asked]
    return max(context_tokens([r.conversation for r in asked], list(map(len, prompts)), limits)) + max(limits)
