"""A process that measures plan after plan, so that its imports are paid once; a new one takes over when it dies or hangs."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import GB
from penstock.planner.common.threads import wait_asleep
from penstock.planner.common.timeline.spans import CPU, SSD
from penstock.planner.contract.plan.plan import Plan

if TYPE_CHECKING:
    import torch

    from penstock.runtime.engine.passes.generate import Batch
    from penstock.runtime.engine.session import Session

WARM_UP = 1
"""Steps of each run that do not count, after the prefill, which has filled the caches."""


class Failed(Exception):
    """What was asked did not come to an end; the message is one line."""


class Worker:
    """Calls functions in a process of its own, which imports torch; this one need not. ``limit_s``: longer than this is a hang."""

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._pipe: Connection | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function``'s answer. UserError as it raised it; Failed for any other end, after which the next call has a new process, for a
        device may be left in any state."""
        if self._process is None:
            self._start()
        try:
            self._pipe.send((function, arguments))
            if not self._pipe.poll(self._limit_s):
                self._process.kill()
                raise Failed(f"no answer in {self._limit_s:g} s")
            answer, error, healthy = self._pipe.recv()
        except (EOFError, OSError) as end:
            self._process.join(5)
            status = self._process.exitcode
            self.close()
            raise Failed(f"its process ended with status {status}") from end
        except Failed:
            self.close()
            raise
        if error is None:
            return answer
        if healthy:
            raise UserError(error)
        self.close()
        raise Failed(error)

    def _start(self) -> None:
        self._pipe, theirs = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(5)
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(pipe: Connection) -> None:
    """Answer (answer, error, whether the process is as good as before) to each call until the other end closes."""
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            said = function(*arguments), None, True
        except UserError as error:
            said = None, " ".join(str(error).split()), True
        except Exception as error:
            said = None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", False
        pipe.send(said)


@dataclass(frozen=True)
class Trial:
    """A plan to be run once: ``steps`` steps are measured."""

    plan: Plan
    checkpoint: Path
    steps: int
    seed: int
    record: Path | None = None
    """Where routings are written."""


@dataclass(frozen=True)
class Measured:
    """Of one run: the median step and the prefill."""

    step_s: float
    prefill_s: float
    link_gbps: float = 0.0
    """Of copies out of the run's own DRAM, where it was asked for."""
    host_gbps: float = 0.0
    """Of what the CPU multiplied by or attended to beside the card, while it did; 0 where it did neither."""
    ssd_gbps: float = 0.0
    """Of reads, while there were any; 0 where there were none."""


@contextmanager
def opened(trial: Trial, graphs: bool | None = None) -> Iterator[tuple[Session, Batch, torch.device]]:
    """The plan's loaded session, what it is to say, and the compute device, with threads asleep while they wait, as in a run that streams.
    UserError when the plan does not fit what is free."""
    wait_asleep()
    import torch

    from penstock.runtime.asked.prompts import random_ids
    from penstock.runtime.engine.open_session import open_session
    from penstock.runtime.engine.passes.generate import Batch
    from penstock.runtime.engine.sides.engine_options import EngineOptions
    from penstock.runtime.memory.budget import Budget
    from penstock.runtime.memory.cuda import find_device, free_vram, open_cuda, told_in_one_line
    from penstock.runtime.memory.free_memory import Free, free_dram, refuse_if_short
    from penstock.runtime.memory.ground import OpenCard

    plan, work = trial.plan, trial.plan.workload
    budget = Budget.of(plan)
    try:
        device = find_device(budget)
        with told_in_one_line(budget, device):
            refuse_if_short(budget, Free(free_dram().dram_bytes, *free_vram(device)))
        prompts = random_ids(plan.decisions.batch, work.prompt_tokens, plan.model.vocab, trial.seed)
        batch = Batch(prompts, trial.steps + WARM_UP + 1, plan.decisions.prefill_chunk_tokens)
        with told_in_one_line(budget, device):
            copier = open_cuda(budget, device)
        with open_session(plan, trial.checkpoint, OpenCard(copier, device), EngineOptions(record=trial.record, graphs=graphs)) as session:
            session.load(batch)
            yield session, batch, device
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def measure(trial: Trial) -> Measured:
    """Run ``trial`` by the engine and the loop of `runtime run`. UserError as :func:`opened`."""
    with opened(trial) as (session, batch, device):
        return ran(session, batch, device, trial.seed)


def measure_with_link(trial: Trial) -> Measured:
    """The same, and what the link then gives out of the run's own DRAM."""
    with opened(trial) as (session, batch, device):
        from penstock.runtime.engine.link_limits import link_gbps

        made = ran(session, batch, device, trial.seed)
        session.engine.stop()
        return replace(made, link_gbps=link_gbps(session.engine) or 0.0)


def ran(session: Session, batch: Batch, device: torch.device, seed: int) -> Measured:
    """``batch`` by an open ``session``."""
    from penstock.runtime.engine.passes.sampling import Sampler, Sampling

    made = session.generate(batch, Sampler(Sampling(temperature=1.0, seed=seed), device))
    totals = session.engine.stage_totals()
    host, ssd = (nbytes / GB / busy_s if busy_s else 0.0 for nbytes, busy_s in (totals.get(stage, (0, 0.0)) for stage in (CPU, SSD)))
    return Measured(median(made.step_s[WARM_UP:]), made.prefill_s, host_gbps=host, ssd_gbps=ssd)


def infer_device_map(checkpoint: Path, room: Mapping[int | str, int]) -> dict[str, int | str]:
    """accelerate's own choice for ``checkpoint`` on the meta device. UserError where accelerate is not installed."""
    from penstock.runtime.model.skeleton import build_skeleton

    try:
        from accelerate import infer_auto_device_map
    except ImportError as error:
        raise UserError("accelerate is not installed, so that its choice is not known; pip install accelerate") from error
    model = build_skeleton(checkpoint)
    return dict(infer_auto_device_map(model, dict(room), no_split_module_classes=list(model._no_split_modules or [])))
