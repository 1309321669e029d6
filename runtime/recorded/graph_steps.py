"""Steps of one shape, recorded: the host launches CUDA graphs in place of a thousand kernels, and copies between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from penstock.planner.common.interrupt import uninterrupted
from penstock.runtime.model.binding import WeightStream
from penstock.runtime.model.rows import Step
from penstock.runtime.recorded.card_pass import CardPass
from penstock.runtime.recorded.host_steps import Flags, HostSteps
from penstock.runtime.recorded.recorded_stream import RecordedStream
from penstock.runtime.recorded.slot_turns import SlotTurns
from penstock.runtime.recorded.tabled_rows import WARMED, TabledRows, TabledStepper, refusal


class Others(Protocol):
    """The other ranks of a dealt model, which record the same at the same time: ``ranks.shared_steps.SharedSteps``."""

    @property
    def leads(self) -> bool:
        """Whether this rank says by which schedule all take a step."""

    def agree(self, refused: str | None) -> str | None:
        """Why any rank refuses; None where none does."""

    def recording(self, flags: Flags) -> AbstractContextManager[Callable[[], None]]:
        """Inside, hidden states go by words of ``flags``. What it gives is called at each launch."""


class GraphSteps:
    """Runs those steps of ``stepper`` whose rows decode or verify, once :meth:`capture` has recorded one that has as many rows, of as many
    tokens. Attention goes by page tables. A row with fewer tokens repeats its last one: it is computed like that one, and writes what it
    writes.

    ``fed_by`` has the model fed by another stream of weights inside: by ``rehearsal``, which moves nothing, and by ``stream``, which is
    recorded by ``graph``. ``turns`` has the ring and the graph use the same slots in turn; None where no ring runs any more. ``host``
    computes units on the CPU. ``others`` record the same or nothing. Costs the activations of one step in memory of its own, and 8 bytes
    for each page of a row.
    """

    def __init__(
        self,
        stepper: TabledStepper,
        graph: CardPass,
        stream: RecordedStream,
        rehearsal: WeightStream,
        fed_by: Callable[[WeightStream], AbstractContextManager[object]],
        turns: SlotTurns | None,
        host: HostSteps | None = None,
        others: Others | None = None,
    ):
        self._stepper, self._graph, self._stream, self._rehearsal = stepper, graph, stream, rehearsal
        self._fed_by, self.turns, self._host, self._others = fed_by, turns, host, others
        self._launched: Callable[[], None] = lambda: None
        self._tabled: TabledRows | None = None
        self._logits = torch.empty(0)
        self.refused: str | None = None
        """Why steps are launched one kernel after the other; None where they are not."""
        self.steps = 0
        """That were launched as a whole."""
        self.rows = self.tokens = 0
        """Of the recorded step, and of each of its rows."""

    def serves(self, step: Step) -> bool:
        """Whether :meth:`run` can compute ``step``."""
        return self._tabled is not None and self._tabled.serves(step)

    @torch.inference_mode()
    def capture(self, step: Step) -> None:
        """Record ``step``, whose rows have as many tokens and pages as any will: later ones may be fewer, never more. What cannot be
        recorded, since the host takes part in it or memory is short, is told by :attr:`refused`. RuntimeError where the passes before fail
        while others wait for their hidden states."""
        stepper, tabled = self._stepper, TabledRows.of(step, self._stepper)
        warmed = False
        try:
            with self._fed_by(self._rehearsal), self._graph.warming():
                for _ in range(WARMED):
                    stepper.compute_tabled(step, tabled.tables, tabled.numbers, tabled.every)
            warmed = True
            flags: Flags = self._graph if self._stream.units else self._graph.pieces  # beside copies as a card has measured them
            beside = nullcontext(self._stream) if self._host is None else self._host.computing(flags, self._stream)
            hops = nullcontext(self._launched) if self._others is None else self._others.recording(self._graph.pieces)
            with beside as fed, self._fed_by(fed), hops as self._launched, self._graph.recording():
                self._logits = stepper.compute_tabled(step, tabled.tables, tabled.numbers, tabled.every)
        except RuntimeError as error:
            if self._others is not None and not warmed:
                raise
            if stepper.device.type == "cuda":
                torch.cuda.synchronize(stepper.device)
            self.refused = refusal(error)
        if self._others is not None:
            self.refused = self._others.agree(self.refused)
        if self.refused is None:
            self._tabled, self.rows, self.tokens = tabled, tabled.rows, tabled.tokens

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """Compute ``step``, which :meth:`serves` -> the wanted logits [step.wanted, vocab] on the device."""
        tabled = self._tabled
        assert tabled is not None
        self.settle()
        with uninterrupted():
            if self.turns is not None:
                self.turns.take()
            tabled.fill(step, self._stepper.put)
            if self._host is not None:
                self._host.begin_step()
            self._stream.begin_launch(step.ends)
            self._graph.launch()
            self._stream.launched()
            self._launched()
            if step.ends and self.turns is not None:
                self.turns.give()
        self.steps += 1
        if all(row.wanted == tabled.tokens for row in step.rows):
            return self._logits[: step.wanted].clone()
        wanted = [k * tabled.tokens + at for k, row in enumerate(step.rows) for at in range(len(row.tokens) - row.wanted, len(row.tokens))]
        return self._logits[self._stepper.put(wanted)]

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
        """Nothing moves any more, and the memory is given back. The CPU waits for no word of a card that fails."""
        try:
            self.settle()
            self._stream.finish()
            self._tabled, self._logits = None, torch.empty(0)
            self._graph.close()
        finally:
            if self._host is not None:
                self._host.close()
