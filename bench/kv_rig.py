"""An engine with a prefix cache, as the cases of ``bench/kv_reuse.py`` use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch, Generation, generate
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.session import Session
from penstock.runtime.kv.batch.kv_sequence import KvSequence, PrefixCache
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.disk.page_writer import DiskWriter
from penstock.runtime.kv.pages.prefix import Prefix
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.cuda import open_cuda
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.memory.ground import OpenCard

ANY_RATE = 1e9
"""GB/s of a disk that is always worth reading from: the benchmark measures what a user's run might decline."""


class Pretended:
    """In place of a prefix cache: tokens before ``start`` count as restored, whatever lies there."""

    def __init__(self, start: int):
        self._start = start

    def restore(self, sequences: Sequence[KvSequence]) -> None:
        for sequence in sequences:
            sequence.cached = self._start

    def confirm(self) -> None:
        """Whatever lies there serves."""

    def keep(self, sequences: Sequence[KvSequence]) -> None:
        """Nothing is kept."""

    def advance(self) -> None:
        """Nothing is kept."""

    finish = advance


@dataclass(frozen=True)
class Rig:
    """A session for prompts of ``length`` tokens, and the directory of pages."""

    session: Session
    plan: Plan

    @property
    def engine(self) -> Engine:
        return self.session.engine

    @property
    def device(self) -> torch.device:
        return self.session.device

    @property
    def shape(self) -> PageShape:
        return self.session.kept.shape

    @property
    def disk(self) -> DiskWriter:
        return self.session.kept.pages

    @property
    def open_s(self) -> float:
        """Seconds to open the directory, its index that is."""
        return self.session.kept.open_s

    @property
    def readers(self) -> int:
        return self.plan.decisions.weights.ssd.queue_depth

    def batch(self, prompt: Sequence[int], new_tokens: int = 1) -> Batch:
        return Batch([prompt], new_tokens, self.plan.decisions.prefill_chunk_tokens)

    def generate(
        self, prompt: Sequence[int], prefix: PrefixCache | None, new_tokens: int = 1, progress: Callable | None = None
    ) -> Generation:
        batch = self.batch(prompt, new_tokens)
        return generate(self.engine.stepper, batch, Sampler(Sampling(), self.device), prefix, progress=progress)

    @contextmanager
    def prefix(self, disk: bool = True) -> Iterator[Prefix]:
        """A cache with nothing in memory."""
        memory = self.engine.page_memory
        with closing(Prefix(self.shape, self.plan, memory, self.disk if disk else None, ANY_RATE, self.readers)) as prefix:
            yield prefix


@contextmanager
def opened(plan: Plan, checkpoint: Path, directory: Path, copier: CopyDevice | None, device: torch.device) -> Iterator[Rig]:
    """Load ``checkpoint``; ``copier`` is None to compute on the CPU."""
    cfg = ReuseConfig(dir=str(directory), limit_bytes=1 << 50, read_gbps=ANY_RATE)
    with open_session(plan, checkpoint, OpenCard(copier, device), reuse=cfg) as session:
        rig = Rig(session, plan)
        session.load(rig.batch([0] * plan.workload.prompt_tokens))
        with torch.inference_mode():
            for buffer in session.engine.kv.buffers().values():
                buffer.zero_()  # pretended tokens are computed over whatever lies there, and what was never written may be no number
        yield rig


def device_of(plan: Plan) -> tuple[CopyDevice | None, torch.device]:
    """What the plan computes on, opened."""
    device = torch.device("cuda", 0) if plan.hardware.gpu else torch.device("cpu")
    return open_cuda(Budget.of(plan), device), device
