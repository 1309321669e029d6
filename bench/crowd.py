"""A run in the middle of which other processes take the cores, and give them back."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass

from bench.worker import Trial
from penstock.planner.common.threads import wait_asleep

LOOP = "while True: pass"


@dataclass(frozen=True)
class Crowd:
    """So many processes that compute all the time, from one step on until another."""

    processes: int
    since: int
    until: int


def crowded_steps(trial: Trial, crowd: Crowd) -> list[float]:
    """Seconds of each of ``trial.steps`` steps. UserError when the plan does not fit what is free."""
    wait_asleep()
    from penstock.runtime.asked.prompts import random_ids
    from penstock.runtime.engine.open_session import open_session
    from penstock.runtime.engine.passes.generate import Batch
    from penstock.runtime.engine.passes.sampling import Sampler, Sampling
    from penstock.runtime.memory.budget import Budget
    from penstock.runtime.memory.cuda import find_device, open_cuda
    from penstock.runtime.memory.ground import OpenCard

    plan, work = trial.plan, trial.plan.workload
    budget = Budget.of(plan)
    device = find_device(budget)
    prompts = random_ids(plan.decisions.batch, work.prompt_tokens, plan.model.vocab, trial.seed)
    batch = Batch(prompts, trial.steps + 1, plan.decisions.prefill_chunk_tokens)
    with ExitStack() as stack:
        others = stack.enter_context(_Others(crowd.processes))

        def progress(phase: str, done: int, total: int) -> None:
            if phase == "decode" and done == crowd.since:
                others.come()
            if phase == "decode" and done == crowd.until:
                others.go()

        with open_session(plan, trial.checkpoint, OpenCard(open_cuda(budget, device), device)) as session:
            session.load(batch)
            made = session.generate(batch, Sampler(Sampling(temperature=1.0, seed=trial.seed), device), progress=progress)
    return list(made.step_s)


class _Others:
    """Processes of this one, which end with it."""

    def __init__(self, count: int):
        self._count, self._running = count, list[subprocess.Popen[bytes]]()

    def come(self) -> None:
        self._running = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(self._count)]

    def go(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()
        self._running = []

    def __enter__(self) -> _Others:
        return self

    def __exit__(self, *_: object) -> None:
        self.go()
