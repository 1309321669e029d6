"""How long a sequence may become: what is asked for, against what a model is made for."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.common.errors import UserError
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload


def within_limit(workload: Workload, model: ModelSpec) -> tuple[Workload, tuple[str, ...]]:
    """``workload`` with no more room than ``model`` can use, and a note where that is less than was asked for. UserError where the prompts
    and replies themselves are longer than the model is made for."""
    limit = model.max_tokens
    if not limit or workload.max_tokens <= limit:
        return workload, ()
    if workload.end_tokens > limit:
        if limit < 2:
            raise UserError(
                f"{model.name} is made for sequences of {limit} token (max_position_embeddings), and a prompt and a reply take 2; "
                "restore the model's own config.json"
            )
        fitting = (
            f"workload.prompt_tokens={limit - workload.new_tokens}" if workload.new_tokens < limit else f"workload.new_tokens={limit // 2}"
        )
        raise UserError(
            f"workload.prompt_tokens={workload.prompt_tokens} and workload.new_tokens={workload.new_tokens}: {model.name} is made for "
            f"sequences of {limit} tokens, prompt and reply together (max_position_embeddings); set {fitting}"
        )
    note = f"a sequence has room for {limit} tokens, all that {model.name} is made for, not for the {workload.context_tokens} asked for"
    return replace(workload, context_tokens=limit), (note,)
