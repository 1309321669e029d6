"""Steps of one shape as one CUDA graph, copies and kernels: the host issues one launch in place of a thousand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.planner.common.interrupt import uninterrupted
from penstock.runtime.kv.attention.page_tables import PageTables, Put
from penstock.runtime.kv.batch.kv_pool import KvPool
from penstock.runtime.model.binding import WeightStream
from penstock.runtime.model.rows import RowKind, Step
from penstock.runtime.recorded.card_graph import CardGraph
from penstock.runtime.recorded.host_steps import HostSteps
from penstock.runtime.recorded.recorded_stream import RecordedStream
from penstock.runtime.recorded.slot_turns import SlotTurns

WARMED = 2
"""Passes before a capture: the first loads kernels and takes memory."""


@dataclass
class _Captured:
    """What a graph reads, all int64 on the card, and what it writes."""

    numbers: torch.Tensor
    """Ids, positions and slots of the pool of all tokens, the rows' firsts of these positions, and the rows' ends."""
    tokens: int
    """Of each row."""
    pages: torch.Tensor
    """[rows, most pages]"""
    held: list[tuple[int, ...]]
    """The pages of each row, as ``pages`` has them."""
    constants: tuple[torch.Tensor, ...]
    """What it reads besides and nobody changes."""
    logits: torch.Tensor


class TabledStepper(Protocol):
    """Computes steps by numbers that lie on the device."""

    device: torch.device
    pool: KvPool

    @property
    def put(self) -> Put: ...
    def compute_tabled(self, step: Step, tables: PageTables, numbers: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor: ...


class GraphSteps:
    """Runs those steps of ``stepper`` whose rows decode or verify, once :meth:`capture` has recorded one that has as many rows, of as many
    tokens. Attention goes by page tables. A row with fewer tokens repeats its last one: it is computed like that one, and writes what it
    writes.

    ``fed_by`` has the model fed by another stream of weights inside: by ``rehearsal``, which moves nothing, and by ``stream``, which is
    recorded into ``graph``. ``turns`` has the ring and the graph use the same slots in turn; None where no ring runs any more. ``host``
    computes units on the CPU. Costs the activations of one step in memory of its own, and 8 bytes for each page of a row.
    """

    def __init__(
        self,
        stepper: TabledStepper,
        graph: CardGraph,
        stream: RecordedStream,
        rehearsal: WeightStream,
        fed_by: Callable[[WeightStream], AbstractContextManager[object]],
        turns: SlotTurns | None,
        host: HostSteps | None = None,
    ):
        self._stepper, self._graph, self._stream, self._rehearsal = stepper, graph, stream, rehearsal
        self._fed_by, self.turns, self._host = fed_by, turns, host
        self._captured: _Captured | None = None
        self.refused: str | None = None
        """Why steps are launched one kernel after the other; None where they are not."""
        self.steps = 0
        """That were launched as a whole."""
        self.rows = self.tokens = 0
        """Of the recorded step, and of each of its rows."""

    def serves(self, step: Step) -> bool:
        """Whether :meth:`run` can compute ``step``."""
        made = self._captured
        if made is None or len(step.rows) > made.pages.shape[0]:
            return False
        tokens, width = made.tokens, made.pages.shape[1]
        return all(row.kind is not RowKind.prompt and len(row.tokens) <= tokens and len(row.pages) <= width for row in step.rows)

    @torch.inference_mode()
    def capture(self, step: Step) -> None:
        """Record ``step``, whose rows have as many tokens and pages as any will: later ones may be fewer, never more. What cannot be
        recorded, since the host takes part in it or memory is short, is told by :attr:`refused`."""
        rows, width, each = len(step.rows), max(len(row.pages) for row in step.rows), len(step.rows[0].tokens)
        device, stepper = self._stepper.device, self._stepper
        flat = torch.zeros(3 * rows * each + 2 * rows, dtype=torch.long, device=device)
        *numbers, starts, ends = flat.split([*[rows * each] * 3, rows, rows])
        pages = torch.zeros(rows, width, dtype=torch.long, device=device)
        every, counts = torch.arange(rows * each, device=device), torch.full((rows,), each, dtype=torch.long, device=device)
        firsts = every[::each].contiguous()
        made = _Captured(flat, each, pages, [()] * rows, (every, firsts, counts), torch.empty(0))
        self._fill(made, step)
        page_tokens = stepper.pool.page_tokens
        tables = PageTables(firsts, starts, counts, ends, pages, page_tokens, each, width * page_tokens)
        try:
            with self._fed_by(self._rehearsal), self._graph.warming():
                for _ in range(WARMED):
                    stepper.compute_tabled(step, tables, numbers, every)
            beside = nullcontext() if self._host is None else self._host.computing(self._graph, self._stream)
            with self._fed_by(self._stream), beside, self._graph.recording():
                made.logits = stepper.compute_tabled(step, tables, numbers, every)
        except RuntimeError as error:
            torch.cuda.synchronize(device)
            self.refused = str(error).strip().partition("\n")[0][:200]
            return
        self._captured, self.rows, self.tokens = made, rows, each

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """Compute ``step``, which :meth:`serves` -> the wanted logits [step.wanted, vocab] on the device."""
        made = self._captured
        assert made is not None
        self.settle()
        with uninterrupted():
            if self.turns is not None:
                self.turns.take()
            self._fill(made, step)
            if self._host is not None:
                self._host.begin_step()
            self._graph.launch()
            self._stream.launched(step.ends)
            if step.ends and self.turns is not None:
                self.turns.give()
        self.steps += 1
        if all(row.wanted == made.tokens for row in step.rows):
            return made.logits[: step.wanted].clone()
        wanted = [k * made.tokens + at for k, row in enumerate(step.rows) for at in range(len(row.tokens) - row.wanted, len(row.tokens))]
        return made.logits[self._stepper.put(wanted)]

    def make_way(self) -> None:
        """A pass comes that is launched in another way."""
        self.settle()
        if self.turns is not None:
            self.turns.give()

    def settle(self) -> float | None:
        """Book the last step -> its seconds; None where it was booked before."""
        seconds = self._stream.settle()
        if seconds is not None and self._host is not None:
            self._host.settle()
        return seconds

    def facts(self) -> dict[str, object]:
        """For the report: rows of a recorded step, or why there is none, and how many were launched."""
        return {"rows": self.rows, "refused": self.refused, "steps": self.steps}

    def stop(self) -> None:
        """Nothing moves any more, and the memory is given back."""
        self.settle()
        self._stream.finish()
        self._captured = None
        self._graph.close()
        if self._host is not None:
            self._host.close()

    def _fill(self, made: _Captured, step: Step) -> None:
        """The numbers of ``step``. Rows that are recorded and not there repeat the last one, and tokens the last of their row."""
        missing = made.pages.shape[0] - len(step.rows)
        rows = [*step.rows, *[step.rows[-1]] * missing]
        page, put = self._stepper.pool.page_tokens, self._stepper.put
        at = [(row, min(k, len(row.tokens) - 1)) for row in rows for k in range(made.tokens)]
        ids, positions = [row.tokens[k] for row, k in at], [row.start + k for row, k in at]
        slots = [row.pages[t // page] * page + t % page for (row, _), t in zip(at, positions, strict=True)]
        made.numbers.copy_(put([*ids, *positions, *slots, *(row.start for row in rows), *(row.end for row in rows)]))
        held = [row.pages for row in rows]
        if held != made.held:
            width = made.pages.shape[1]
            made.pages.copy_(put([number for one in held for number in (*one, *[0] * (width - len(one)))]).view(-1, width))
            made.held = held
