"""`planner replan`: a plan's own problem, solved again for a longer or shorter context, or for other cards of the same kind."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.asked.verb_schema import ReplanConfig
from penstock.planner.common.errors import UserError
from penstock.planner.common.output import writable
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.plan.planfile import read_plan
from penstock.planner.explain.explanation import question_of
from penstock.planner.solver.context_limit import within_limit
from penstock.planner.solver.layer_counts import with_counts
from penstock.planner.solver.planning import answer
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.solver.terms.problem import Question
from penstock.planner.verbs.solve_verb import keep_plan


def replan_verb(cfg: ReplanConfig) -> None:
    """Solve, write and print. What was forced in the older plan is free again, but for the expert policy. UserError where the model is made
    for less, where there are no cards to choose from, or no plan fits."""
    writable(user_path(cfg.out), "out")
    before = question_of(read_plan(user_path(cfg.plan)))
    question, changed = _on_devices(before, cfg.devices)
    if any(question.taken) or question.ranks != before.ranks:  # layers were dealt for what is not there
        question = with_counts(replace(question, layers=(), taken=(0, 0)))
    limit = question.model.max_tokens
    if limit and cfg.context_tokens is not None and cfg.context_tokens > limit:
        raise UserError(
            f"context_tokens={cfg.context_tokens}: {question.model.name} is made for sequences of {limit} tokens (max_position_embeddings);"
            f" set context_tokens={limit}, or shorten prompt and reply"
        )
    asked = question.workload if cfg.context_tokens is None else replace(question.workload, context_tokens=cfg.context_tokens)
    workload, notes = within_limit(asked, question.model)
    solved = answer_dealt if question.ranks > 1 else answer
    keep_plan(solved(replace(question, workload=workload), (*notes, *changed)), cfg.out, cfg)


def _on_devices(question: Question, devices: list[int] | None) -> tuple[Question, tuple[str, ...]]:
    """``question`` for the cards of these numbers, with as many ranks as it had or as there are cards, and a note of it."""
    hardware = question.hardware
    if devices is None:
        return question, ()
    if hardware.gpu is None or not devices or len(set(devices)) < len(devices) or min(devices) < 0:
        raise UserError(
            f"devices={devices}: must be numbers of GPUs, each once, for a plan that computes on one; leave it out for the plan's"
        )
    ranks = hardware.hosts * min(question.ranks // hardware.hosts, len(devices))
    there = replace(question, hardware=replace(hardware, devices=tuple(devices)), ranks=ranks)
    was, now = (f"{n} rank{'s' * (n > 1)}" for n in (question.ranks, ranks))
    return there, (f"solved again for GPU{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}: {now}, and {was} before",)
