"""An open model: loaded, computed with, told about."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.schedules import launched_singly, launching_prompts
from penstock.runtime.asked.run_schema import ReuseConfig
from penstock.runtime.beside.on_host import StoredOnHost
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.passes.generate import Batch, Finished, Generation, Progress, generating, logits_behind
from penstock.runtime.engine.passes.sampling import Sampler
from penstock.runtime.kv.batch.kv_sequence import KvSequence
from penstock.runtime.kv.disk.disk_pages import DiskPages
from penstock.runtime.kv.disk.keeping import read_gbps
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.pages.advice import advice
from penstock.runtime.kv.pages.prefix import Prefix
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.cuda import VramWatch, take_planned
from penstock.runtime.memory.free_memory import PeakDram
from penstock.runtime.memory.pageable import pageable_note, slowed_by_pageable
from penstock.runtime.model.rows import Step
from penstock.runtime.ranks.dealt_pages import LedPages, PagesElsewhere
from penstock.runtime.ranks.rank import Rank
from penstock.runtime.speculate.open_chains import DraftingModel, open_chains

KEEPING = "keeping"
"""The phase in which pages of KV are waited for."""
Made = Generator[Generation, None, None]
Mark = Callable[[str], None]
"""Called with the name of a phase of the start that is over."""


class Kept(NamedTuple):
    """What a session keeps KV pages by."""

    cfg: ReuseConfig
    shape: PageShape
    pages: DiskPages | None
    """The directory; None where pages live as long as the session."""
    open_s: float
    """Seconds that opening it took."""


class WarmsUp(Protocol):
    """What chooses from logits."""

    def warm_up(self, logits: torch.Tensor) -> None:
        """Load the kernels that choosing from ``logits`` takes."""


class Session:
    """A model with its threads, memory and files. Made by ``open_session`` alone; one batch at a time, from one thread."""

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        peak: PeakDram,
        kept: Kept | None,
        mark: Mark,
        stack: ExitStack,
        on_host: StoredOnHost | None,
        drafter: Session | None = None,
        rank: Rank | None = None,
    ):
        self.rank = rank
        """Which part of the plan this process has; None where it has all of it."""
        self.plan = plan
        """Predicted anew where the machine refused to page-lock its DRAM."""
        self.engine = engine
        self.prefix: Prefix | None = None
        """KV that is kept for later prompts, once :meth:`load` is over; None where none is, and where rank 0 says what is kept."""
        self.led_pages: LedPages | None = None
        """KV of this rank's layers that is kept as rank 0 says, once :meth:`finish_loading` is over."""
        self.cpu_products: dict[str, str] | None = None if on_host is None else on_host.products
        """Coded format -> ``stored`` or ``decode``, as the CPU multiplies few rows by it; None where all is decoded, or a card computes."""
        self.pageable: str | None = None
        """How much DRAM could not be page-locked, and what that costs."""
        self.launched: str | None = None
        """That steps are not recorded although the plan says so, and why, once :meth:`load` is over."""
        self.prompts_launched: str | None = None
        """The same of prompts."""
        self.slow_pages: str | None = None
        """That kept KV lies on a drive too slow to pay, once :meth:`load` is over."""
        self.loaded: dict[str, tuple[float, int]] = {}
        """What arrived on other threads until :meth:`load` was over, each with its busy seconds and bytes."""
        self.drafter = drafter
        """The model that drafts, where one does."""
        self.chains = open_chains(plan, engine.model, engine.device, None if drafter is None else drafter.drafting)
        """Drafted tokens, where the plan has some."""
        for session in (self, *(() if drafter is None else (drafter,))):
            if self.chains is not None and not session.engine.stepper.goes_back:
                raise UserError(
                    f"speculation.drafter={plan.decisions.speculation.drafter}: {session.plan.model.name} keeps states that cannot go back"
                    " to an earlier token; set speculate=none"
                )
        self.kept = kept
        self._peak, self._mark, self._stack = peak, mark, stack
        self._vram: VramWatch | None = None
        if engine.arena.refused:
            self.plan = plan if rank is not None else slowed_by_pageable(plan, engine.arena.locked_bytes / engine.arena.nbytes)
            self.pageable = pageable_note(engine.arena, plan, self.plan)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def drafting(self) -> DraftingModel:
        """This model, where it drafts for another one."""
        return DraftingModel(self.plan, self.engine.stepper, self.engine.model)

    @property
    def own(self) -> Plan:
        """What of :attr:`plan` this process runs."""
        return self.plan.of_rank(0 if self.rank is None else self.rank.number)

    def load(self, largest: Batch, progress: Progress = lambda *_: None, samplers: Sequence[WarmsUp] = ()) -> None:
        """Fill every place and start the stream. While weights arrive, passes of ``largest``'s shape and what ``samplers`` do with their
        logits are rehearsed."""
        self.engine.begin_loading()
        self.engine.warm_up(largest)
        logits = torch.zeros(len(largest.prompts), self.plan.model.vocab, dtype=self.engine.model.dtype, device=self.device)
        for sampler in samplers:
            sampler.warm_up(logits)
        self._mark("rehearsal")
        if self.rank is not None and self.rank.leading is not None:
            self.rank.leading.finish_loading(self.engine.longest)
        self.finish_loading(progress, largest)
        self._mark("room")

    def finish_loading(self, progress: Progress = lambda *_: None, largest: Batch | None = None) -> None:
        """The second half of :meth:`load`, after rehearsals. A model that drafts is loaded for ``largest``."""
        self.engine.finish_loading(progress)
        if self.engine.copier is not None:
            self._peak.leave_out_cuda(self.engine.arena.nbytes)
        self.loaded = self.engine.loading.arrived()
        why, gpu = self.engine.recording.launched_because, self.plan.hardware.gpu
        if why is not None and gpu is not None and gpu.layer_kernels_s:
            alone = self.rank is None and self.plan.placement.host_units  # ranks have an interpreter hand them over
            copied = "; what the plan leaves to the CPU is copied to the card" if alone else ""
            self.launched = f"a decode step is launched kernel by kernel, not recorded: {why}{copied}"
            self.plan = self.plan if self.rank is not None else launched_singly(self.plan)
        if (why := self.engine.prompts.launched_because) is not None:
            self.prompts_launched = f"prompts are launched kernel by kernel, not recorded: {why}"
            self.plan = launching_prompts(self.plan)
        if self.drafter is not None and largest is not None:
            self.drafter.load(replace(largest, chunk_tokens=self.drafter.plan.chunk_tokens(len(largest.prompts))))
            if self.chains is not None:
                self.engine.stepper.watcher = self.chains.watcher
        self._mark("load")
        take_planned(Budget.of(self.own), self.device)
        self._vram = VramWatch(Budget.of(self.own), self.device)
        if self.kept is not None:
            self._keep_prefixes(self.kept)

    def _keep_prefixes(self, kept: Kept) -> None:
        own, memory, settle = self.own, self.engine.page_memory, self.engine.outside.settle
        readers, leading = own.decisions.weights.ssd.queue_depth, None if self.rank is None else self.rank.leading
        if self.rank is not None and leading is None:
            self.led_pages = self._stack.enter_context(closing(LedPages(kept.shape, memory, kept.pages, readers, settle)))
            return
        rate, others = read_gbps(kept.cfg), None if leading is None else PagesElsewhere(leading)
        prefix = Prefix(kept.shape, own, memory, kept.pages, rate, readers, settle, flush_s=kept.cfg.flush_s, others=others)
        self.prefix = self._stack.enter_context(closing(prefix))
        self.slow_pages = None if kept.pages is None else advice(kept.pages.directory, own, rate)

    def book(self, phase: str) -> None:
        """Have the other ranks book what they did since the last call to ``phase``."""
        if self.rank is not None and self.rank.leading is not None:
            self.rank.leading.book(phase)

    def step(self, step: Step) -> torch.Tensor:
        """One pass over the weights, after :meth:`load` -> the wanted logits [step.wanted, vocab] on the device. Whoever calls it takes the
        rows' pages from ``engine.kv.pages`` and releases them."""
        return self.engine.stepper.run(step)

    def generate(
        self,
        batch: Batch,
        sampler: Sampler,
        finished: Finished | None = None,
        progress: Progress | None = None,
        keep_logits: bool = False,
        reuse: bool = True,
    ) -> Generation:
        """A whole batch. One batch at a time, after :meth:`load`; a batch that was broken off between two passes leaves the next one
        right. Without ``reuse`` no prompt is restored or kept."""
        *_, made = self.generating(batch, sampler, finished, progress, keep_logits, reuse)
        return made

    def generating(
        self,
        batch: Batch,
        sampler: Sampler,
        finished: Finished | None = None,
        progress: Progress | None = None,
        keep_logits: bool = False,
        reuse: bool = True,
        living: Sequence[KvSequence] | None = None,
    ) -> Made:
        """As :meth:`generate`: a batch whose maker may leave it between two passes."""
        return generating(
            self.engine.stepper, batch, sampler, self.prefix if reuse else None, finished, progress, keep_logits, living, self.chains
        )

    def logits(self, batch: Batch) -> torch.Tensor:
        """Of the token behind each prompt: [batch, vocab] on the CPU, in the model's type."""
        return logits_behind(self.engine.stepper, batch, self.prefix).cpu()

    def make_way(self, progress: Progress = lambda *_: None) -> None:
        """Between two batches: where kept KV takes slots that the next batch may want, wait until the directory has it; all calls together
        take ``kv.flush_s`` at most."""
        if self.prefix is not None and self.prefix.crowded:
            self.prefix.drain(partial(progress, KEEPING))

    def flush(self, progress: Progress = lambda *_: None) -> None:
        """At the end: wait until the directory has all KV that is kept, as long as ``kv.flush_s`` allows. Call it before closing; a session
        that is closed without it keeps what is in transit alone."""
        if self.prefix is not None and self.kept is not None and self.kept.pages is not None:
            self.prefix.flush(partial(progress, KEEPING))

    def kept_facts(self) -> dict[str, Any] | None:
        """What was restored and kept so far, for the report; None where nothing is kept."""
        if self.led_pages is not None:
            return self.led_pages.facts()
        if self.kept is None or self.prefix is None:
            return None
        pages = self.kept.pages
        return {"dir": None if pages is None else str(pages.directory), **self.prefix.facts()}

    @property
    def peak_dram_bytes(self) -> int:
        """What the process held at most beside what it held before the arena."""
        return self._peak.peak_bytes()

    @property
    def vram(self) -> VramWatch:
        """What was taken of the card since :meth:`load`."""
        if self._vram is None:
            raise RuntimeError("the session is not loaded")
        return self._vram
