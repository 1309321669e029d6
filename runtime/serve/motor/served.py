"""A session opened to serve: what its plan says of rows and passes, loaded and rehearsed, and the loop over it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import transformers

from penstock.planner.common.outside.installed import installed_version
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.stages import MixedPass
from penstock.planner.contract.serving.pass_prices import PassPrices
from penstock.planner.contract.serving.serve_drafts import PlannedDrafts
from penstock.planner.contract.serving.serve_limits import ServeLimits
from penstock.planner.contract.serving.serve_scheduler import Scheduler
from penstock.planner.contract.speculation.chain_lengths import ChainLengths
from penstock.runtime.asked.order import capacity_tokens
from penstock.runtime.asked.prompts import read_vocabulary
from penstock.runtime.asked.run_schema import RunConfig
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.passes.generate import Batch, Progress
from penstock.runtime.engine.passes.rehearsal import AnyRows
from penstock.runtime.engine.session import Session
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.memory.ground import Ground
from penstock.runtime.serve.motor.grammars import Grammars
from penstock.runtime.serve.motor.inbox import Inbox
from penstock.runtime.serve.motor.intake import Intake, ServeLaw
from penstock.runtime.serve.motor.logprobs import block_rows, drawn_rows, wanted_rows
from penstock.runtime.serve.motor.pool_prefix import PoolPrefix
from penstock.runtime.serve.motor.row_sampling import RowSampler
from penstock.runtime.serve.motor.serve_sequences import ServeSequences
from penstock.runtime.serve.motor.serving_loop import ServingLoop
from penstock.runtime.serve.motor.vitals import Vitals, tiers
from penstock.runtime.serve.wire.frames import Frames
from penstock.runtime.serve.wire.messages import EngineInfo, Open, Ready, said
from penstock.runtime.speculate.chains import Chains


class Served:
    """``with`` it the model is loaded; ``ground`` is given back with it."""

    def __init__(
        self,
        cfg: RunConfig,
        plan: Plan,
        checkpoint: Path,
        ground: Ground,
        asked: Open,
        tell: Progress = lambda *_: None,
    ):
        self._cfg, self._plan, self._checkpoint, self._ground, self._asked, self._tell = cfg, plan, checkpoint, ground, asked, tell
        self._stack = ExitStack()
        self.session: Session

    def __enter__(self) -> Served:
        with ExitStack() as stack:
            transformers.utils.logging.disable_progress_bar()
            self._vocabulary = read_vocabulary(self._checkpoint, self._plan.model.vocab)
            plan, checkpoint, ground = self._plan, self._checkpoint, self._ground
            options = EngineOptions(**vars(self._cfg.engine), row_tokens=self._counted_tokens, keep_pool=True, tell=_to_stderr)
            opened = open_session(plan, checkpoint, ground, options, self._cfg.kv, mark=lambda phase: self._tell(phase, 1, 1))
            self.session = session = stack.enter_context(opened)
            self._sampler = RowSampler(session.engine.stepper.put, drawn_rows(plan), block_rows(plan))
            session.load(self._largest, self._tell, [self._sampler, *self._any_rows])
            for line in (session.pageable, session.launched, session.prompts_launched, session.slow_pages):
                if line is not None:
                    _to_stderr(line)
            self._grammars = None
            if self._asked.grammars and self._vocabulary.tokenizer is not None:
                self._grammars = Grammars(self._vocabulary.tokenizer, session.plan.model.vocab, sorted(self._vocabulary.stop_ids))
                stack.enter_context(closing(self._grammars))
            self._planned = PlannedDrafts(session.plan, self._limits, PassPrices(session.plan))
            self._vitals = Vitals(session, self._limits, self._planned.seconds)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def run(self, frames: Frames, inbox: Inbox) -> bool:
        """Serve until the front drains: True; or has gone: False."""
        frames.send(said(Ready(self.info)))
        session, stepper, plan = self.session, self.session.engine.stepper, self.session.plan
        shares = session.prefix or (PoolPrefix(stepper.pool.pages) if stepper.goes_back else None)
        law = ServeLaw(plan.model.vocab, self.capacity_tokens, wanted_rows(plan, self._limits.pass_tokens), block_rows(plan))
        chains = self._chains(law.wanted_rows)
        sequences = ServeSequences(stepper, shares, chains)
        scheduler = Scheduler(self._limits, sequences)
        generation, totals = self._vocabulary.generation, self._vitals.totals
        intake = Intake(scheduler, sequences, generation, self._grammars, law, stepper.put, inbox, totals)
        loop = ServingLoop(session.step, stepper.put, self._sampler, scheduler, sequences, intake, law, inbox, frames, self._vitals, chains)
        over = loop.run()
        if over:
            session.flush(self._tell)
        return over

    def _chains(self, wanted_rows: int) -> Chains | None:
        """Drafts as the plan has them, by the rows that share a pass, within the logits that one may give."""
        chains, limits = self.session.chains, self._limits
        if chains is not None:
            planned = self._planned
            spare = wanted_rows - limits.rows
            chains.lengths = ChainLengths(
                lambda rows: min(planned.most(rows), spare // rows),
                lambda rows, drafts: planned.pass_s(rows)(drafts),
                chains.lengths.acceptance,
            )
        return chains

    def text(self, ids: list[int]) -> str:
        """What ``ids`` say."""
        return self._vocabulary.text(ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that the checkpoint's replies end with."""
        return self._vocabulary.stop_ids

    def report(self) -> dict[str, Any]:
        """Of all that was served."""
        return self._vitals.report()

    @property
    def info(self) -> EngineInfo:
        """What a front is told of it."""
        plan, made = self.session.plan, self.session.plan.prediction
        predicted: dict[str, Any] = {
            "decode_s_per_token": made.decode_s_per_token,
            "tokens_per_s": made.decode_tokens_per_s,
            "ttft_s": made.ttft_s,
            "binds": str(made.bottleneck_decode),
            "tiers": tiers(self.session.own),
        }
        return EngineInfo(
            plan.model.name,
            str(self._checkpoint),
            plan.model.vocab,
            self.capacity_tokens,
            asdict(self._limits),
            predicted,
            self._longest_pass_s,
            installed_version("penstock") or "source tree",
        )

    @property
    def _longest_pass_s(self) -> float:
        """All rows decode and prompts fill the pass, over a full pool. Prompts whose logprobs are asked for are cut into several passes."""
        limits, most = self._limits, self.capacity_tokens
        context = min(most, limits.capacity_tokens / limits.rows)
        fullest = MixedPass(limits.rows, context, max(1, limits.pass_tokens - limits.rows), most, most)
        parts, drafts = -(-limits.pass_tokens // wanted_rows(self._plan, limits.pass_tokens)), self._planned.pass_s(limits.rows)
        return self._planned.seconds(fullest) * parts + drafts(self._planned.most(limits.rows)) + self._planned.reading_s(most)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of a prompt and its reply: what activations are counted for, what the pool holds, what the model is made for."""
        return min(n for n in (self._counted_tokens, self._limits.capacity_tokens, self._plan.model.max_tokens) if n)

    @property
    def _counted_tokens(self) -> int:
        """Tokens of one sequence that the plan's activations are counted for."""
        return max(self._plan.workload.max_tokens, capacity_tokens(self._plan))

    @cached_property
    def _limits(self) -> ServeLimits:
        """The plan's, with all pages that the pool has."""
        limits, pool = ServeLimits.of(self._plan), self.session.engine.kv.pages
        return replace(limits, pages=pool.slots, queue=self._asked.queue or limits.queue)

    @property
    def _any_rows(self) -> Sequence[AnyRows]:
        """What is rehearsed of them: on a card alone, since nothing is loaded or compiled on demand on the CPU."""
        limits, engine = self._limits, self.session.engine
        if engine.copier is None:
            return ()
        most = min(limits.pages // limits.rows * limits.page_tokens, self.capacity_tokens)
        heads = getattr(engine.model.config.get_text_config(decoder=True), "num_attention_heads", 1)
        return (AnyRows(engine.stepper, limits.rows, most, limits.pass_tokens, heads),)

    @property
    def _largest(self) -> Batch:
        """All rows with prompts as long as the pool has room for beside each other."""
        plan, limits = self._plan, self._limits
        rows = limits.rows
        tokens = max(1, min(plan.workload.prompt_tokens, limits.pages // rows * limits.page_tokens - 1))
        return Batch([(0,) * tokens] * rows, 1, min(plan.chunk_tokens(rows), tokens))


def _to_stderr(line: str) -> None:
    print(f"note: {line}", file=sys.stderr, flush=True)
