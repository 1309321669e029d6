"""`planner replan`: a plan's own problem, solved again for a longer or shorter context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.planner.asked.verb_schema import ReplanConfig
from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.planfile import read_plan
from penstock.planner.explain.explanation import question_of
from penstock.planner.solver.context_limit import within_limit
from penstock.planner.solver.planning import answer
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.verbs.solve_verb import keep_plan


def replan_verb(cfg: ReplanConfig) -> None:
    """Solve, write and print. What was forced in the older plan is free again, but for the expert policy. UserError where the model is made
    for less, or no plan fits."""
    question = question_of(read_plan(Path(cfg.plan).expanduser()))
    limit = question.model.max_tokens
    if limit and cfg.context_tokens > limit:
        raise UserError(
            f"context_tokens={cfg.context_tokens}: {question.model.name} is made for sequences of {limit} tokens (max_position_embeddings);"
            f" set context_tokens={limit}, or shorten prompt and reply"
        )
    workload, notes = within_limit(replace(question.workload, context_tokens=cfg.context_tokens), question.model)
    solved = answer_dealt if question.ranks > 1 else answer
    keep_plan(solved(replace(question, workload=workload), notes), cfg.out, cfg)
