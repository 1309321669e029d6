"""One pass over the weights for rows of any lengths: packed input in, the wanted logits out."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from transformers import PreTrainedModel

from penstock.planner.common.outside.cache_name import cache_name
from penstock.runtime.engine.passes.step_inputs import CopiedInputs, StepInputs, step_numbers
from penstock.runtime.engine.sides.launch_seconds import LaunchSeconds
from penstock.runtime.kv.attention.page_tables import Elsewhere, PagedKernel, PageTables, Put
from penstock.runtime.kv.attention.paged_attention import PagedAttention, attends_over_pages
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.kv.batch.row_cache import row_cache
from penstock.runtime.kv.batch.row_positions import positions_by_row
from penstock.runtime.kv.batch.row_states import RowStates
from penstock.runtime.kv.batch.rows_alone import Gates, RowsAlone
from penstock.runtime.model.rows import Step
from penstock.runtime.ranks.followers import Leading


class WholeSteps(Protocol):
    """Computes steps without this class's calls of the model."""

    def serves(self, step: Step) -> bool:
        """Whether :meth:`run` can compute ``step``."""

    def run(self, step: Step) -> torch.Tensor:
        """The wanted logits [step.wanted, vocab] on the device."""

    def schedule(self) -> int | None:
        """Number of the schedule that the next step is to follow, as :class:`Step` has it; None where there is one alone."""

    def make_way(self) -> None:
        """A step comes that it does not serve."""


class Watcher(Protocol):
    """Is told what was computed, where the model's hidden states are of use."""

    def saw(self, step: Step) -> None:
        """``step`` was computed."""

    def ended(self, number: int) -> None:
        """Sequence ``number`` has ended."""


class Stepper:
    """``model`` over ``pool``, on ``device``. Knows no requests: whoever calls it says which tokens of which sequences come.

    A pass costs its tokens' activations. ``begin_pass`` is called before each pass. A model that does not attend over pages has its rows
    computed one by one, in lockstep between ``gates``. Its rows have caches of their own in place of the pool. ``leading`` has other ranks
    do the same.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        pool: KvPool,
        begin_pass: Callable[[Step], None] = lambda step: None,
        inputs: StepInputs | None = None,
        kernel: PagedKernel | None = None,
        gates: Gates | None = None,
        elsewhere: Elsewhere | None = None,
        leading: Leading | None = None,
    ):
        self.device, self.pool, self._leading = device, pool, leading
        self._model, self._begin_pass = model, begin_pass
        self._inputs = inputs or CopiedInputs(device)
        self._alone = None if attends_over_pages(model) else RowsAlone(model, gates)
        if self._alone is None:
            self.attention = PagedAttention(model, device, pool, kernel, elsewhere)
            self._states = RowStates(model, pool)
            positions_by_row(model, lambda: pool.step)
            self._cached = {cache_name(model.forward): row_cache(model.config)}
        self.graphs: WholeSteps | None = None
        """What computes some steps as a whole; nothing until somebody says so."""
        self.launching: LaunchSeconds | None = None
        """Is told of each pass that is launched here; nobody until somebody says so."""
        self.watcher: Watcher | None = None
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """Compute ``step`` -> the wanted logits [step.wanted, vocab] on the device, in the order of its rows."""
        if self._leading is not None:
            if self.graphs is not None and self.graphs.serves(step):
                step = replace(step, schedule=self.graphs.schedule())
            with self._leading.passing(step):
                return self._run(step)
        logits = self._run(step)
        if self.watcher is not None:
            self.watcher.saw(step)
        return logits

    def _run(self, step: Step) -> torch.Tensor:
        if self.graphs is not None:
            if self.graphs.serves(step):
                return self.graphs.run(step)
            self.make_way()
        begun_s = time.perf_counter()
        logits = self.compute(*self.begin(step))
        self.pool.end_pass()
        if self.launching is not None:
            self.launching.note(step.has_prompt, time.perf_counter() - begun_s)
        return logits

    def make_way(self) -> None:
        """No decode step comes next: what a prompt begins with may come."""
        if self.graphs is not None:
            self.graphs.make_way()

    @property
    def paged(self) -> PagedAttention | None:
        """How the model attends, where rows are packed."""
        return self.attention if self._alone is None else None

    @property
    def put(self) -> Put:
        """Brings numbers to the device, as int64."""
        return self._inputs.put

    def begin(self, step: Step) -> tuple[torch.Tensor, ...]:
        """All that the host does before a pass -> its token ids, positions and indices of wanted tokens, on the device."""
        numbers = self._inputs.put(step_numbers(step))
        self.pool.begin_pass(step)
        if self._alone is None:
            self.attention.begin_pass(step, self._inputs.put)
        self._begin_pass(step)
        return numbers.split([step.tokens, step.tokens, step.wanted])

    def compute_tabled(self, step: Step, tables: PageTables, numbers: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
        """The logits of ``step`` by numbers [ids, positions, slots of the pool] that lie on the device alone: what a graph can record.
        RuntimeError where the model asks the host."""
        if self._alone is not None or self._states.any:
            raise RuntimeError("rows are computed one by one")
        self.pool.begin_pass(step)
        self._begin_pass(step)
        self.attention.begin_tables(tables, numbers[2])
        logits = self.compute(numbers[0], numbers[1], wanted)
        self.pool.end_pass()
        return logits

    def compute(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """What the device does in the pass that was begun -> the wanted logits."""
        if self._alone is not None:
            return self._alone.compute(self.pool.step, ids)
        # an index, not a count: the product of a slice of the prompt with the LM head would copy the head
        extra = {"logits_to_keep": wanted} if self._keeps else {}
        out = self._model(input_ids=ids[None], position_ids=positions[None], use_cache=True, **self._cached, **extra)
        return out.logits[0] if self._keeps else out.logits[0, wanted]

    def pretend(self, sequence: int, tokens: int) -> None:
        """So many tokens of ``sequence`` were computed, in a rehearsal: whatever lies there serves."""
        (self._alone or self._states).pretend(sequence, tokens)
        if self._leading is not None:
            self._leading.pretend(sequence, tokens)

    @contextmanager
    def unled(self) -> Iterator[None]:
        """Inside, other ranks are told nothing: they do the same by themselves."""
        leading, self._leading = self._leading, None
        try:
            yield
        finally:
            self._leading = leading

    @property
    def recorded(self) -> bool:
        """Whether decode steps are launched as a whole."""
        return self.graphs is not None

    @property
    def goes_back(self) -> bool:
        """Whether a sequence may be computed again from an earlier token on: K and V can be written over, other states cannot."""
        return self._alone is None and not self._states.any

    def forget(self, sequence: int) -> None:
        """``sequence`` has ended."""
        (self._alone or self._states).forget(sequence)
        self.pool.forget(sequence)
        if self.watcher is not None:
            self.watcher.ended(sequence)
        if self._leading is not None:
            self._leading.forget(sequence)
