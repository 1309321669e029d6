"""How long a simulation may become, and what is said of one that takes a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_seconds
from penstock.planner.contract.plan.plan import Plan

MOST_PASSES = 10_000_000
"""Passes over the model; of each decode step 8 bytes are kept."""
HINT_AFTER_S = 5.0


def check_length(plan: Plan) -> None:
    """UserError for a workload of more than ``MOST_PASSES`` passes over the model."""
    work, decided = plan.workload, plan.decisions
    waves = -(-max(work.requests, decided.batch) // decided.batch)
    passes = waves * (work.new_tokens - 1 - (-work.prompt_tokens // decided.prefill_chunk_tokens))
    if passes > MOST_PASSES:
        raise UserError(
            f"workload.requests={work.requests}, workload.new_tokens={work.new_tokens}: {passes} passes over the model, and at most "
            f"{MOST_PASSES} are simulated; lower one of them in the plan"
        )


class Hint:
    """Says once, through ``say``, how long the rest takes, when ``HINT_AFTER_S`` have passed and as much again is to come."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock, self._began = say, clock, clock()

    def __call__(self, done: int, of: int) -> None:
        """``done`` of ``of`` decode steps are over."""
        passed_s = self._clock() - self._began
        if passed_s < HINT_AFTER_S or not done:
            return
        rest_s = passed_s / done * (of - done)
        if rest_s > HINT_AFTER_S:
            self._say(
                f"{done} of {of} decode steps are simulated; the rest takes about {show_seconds(rest_s)}. Fewer workload.requests or "
                "workload.new_tokens in the plan take less"
            )
        self._say = lambda line: None
        self._began = float("inf")
