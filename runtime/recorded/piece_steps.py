"""Decode steps of models with routed experts: all between one layer's experts and the next layer's is recorded. So are the experts of one
token, where kernels can look up where these lie; the host brings them. Otherwise experts are launched as ever. Of several ranks a piece
holds the hops on both sides of its layers, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch

from penstock.planner.common.interrupt import uninterrupted
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.experts.expert_forward import LayerExperts, Runner, Tabled
from penstock.runtime.experts.products.beside_card import Made
from penstock.runtime.experts.products.expert_products import Parameters
from penstock.runtime.experts.products.staged_experts import Staging
from penstock.runtime.model.binding import WeightStream
from penstock.runtime.model.rows import Step
from penstock.runtime.recorded.graph_steps import Others
from penstock.runtime.recorded.host_steps import Flags
from penstock.runtime.recorded.tabled_rows import WARMED, TabledRows, TabledStepper, refusal


class Pieces(Flags, Protocol):
    """As :class:`penstock.runtime.recorded.card_pieces.CardPieces`."""

    def warming(self) -> AbstractContextManager[None]: ...
    def record(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor: ...
    def cut(self) -> object: ...
    def launch(self, number: int) -> None: ...
    def close(self) -> None: ...


class RoutedModel(Protocol):
    """A model whose layers' experts can be computed by somebody else."""

    def handed_over(self, to: Callable[[int, LayerExperts], Runner]) -> AbstractContextManager[None]:
        """Inside, each layer computes by what ``to`` gives for its number and its own experts."""


class _Cut(NamedTuple):
    """Where the piece ``number`` ends: the tensors that it leaves for the layer's experts, and the one that the next piece reads. Where
    they are ``found`` by a table, the piece behind it is that of the experts."""

    layer: int
    experts: LayerExperts
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    made: torch.Tensor
    number: int
    found: Tabled | None


class PieceSteps:
    """Runs steps of as many decode rows as :meth:`record` has recorded. Attention goes by page tables.

    A step is a launch a layer, and what its experts take. ``stream`` is whatever books units now, which are ``units`` in the pass's order,
    none of which moves; ``begin`` tells all others of a pass. Costs the activations of one step in memory of its own.
    """

    def __init__(
        self,
        stepper: TabledStepper,
        pieces: Callable[[], Pieces],
        model: RoutedModel,
        units: Sequence[Unit],
        stream: Callable[[], WeightStream],
        begin: Callable[[Step], None],
        longest: Callable[[Callable[[Step], None]], None],
        alias: Callable[[torch.Tensor], torch.Tensor],
        staged_bytes: int,
        results: torch.Tensor | None,
        others: Others | None = None,
    ):
        """``longest`` has its argument see the longest step that will come. ``alias`` is that of
        :class:`penstock.runtime.experts.products.expert_table.ExpertTable`. ``staged_bytes``: what may be taken of the device to copy one
        token's experts to one place. ``results``: where experts have their rows that are computed elsewhere, None where all are
        computed here. ``others`` record the same or nothing."""
        self._stepper, self._open, self._model, self._units = stepper, pieces, model, tuple(units)
        self._stream, self._begin, self._longest, self._alias, self._others = stream, begin, longest, alias, others
        self._hopped: Callable[[], None] = lambda: None
        self._tabled: TabledRows | None = None
        self._pieces: Pieces | None = None
        self._cuts: list[_Cut] = []
        self._tables: dict[int, Tabled] = {}
        self._staging, self._results = Staging(staged_bytes), results
        self._count = 0
        """Of pieces."""
        self._logits = torch.empty(0)
        self.refused: str | None = None
        """Why steps are launched one kernel after the other; None where they are not."""
        self.steps = 0
        """That were launched in pieces."""
        self.visits = 0
        """Of layers whose experts were one launch."""

    def record(self) -> PieceSteps:
        """Record a step, over whatever lies in the buffers: experts are those of a rehearsal. RuntimeError where the passes before
        it fail while others wait for their hidden states."""
        self._longest(self._capture)
        return self

    record_still = record
    """What is recorded moves nothing."""

    def serves(self, step: Step) -> bool:
        """Whether :meth:`run` can compute ``step``: as many rows and tokens as are recorded. Others in their place would visit experts."""
        tabled = self._tabled
        return tabled is not None and tabled.serves(step) and (len(step.rows), step.tokens) == (tabled.rows, tabled.rows * tabled.tokens)

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        """Compute ``step``, which :meth:`serves` -> logits [rows, vocab] on the device."""
        tabled, pieces = self._tabled, self._pieces
        assert tabled is not None and pieces is not None
        with uninterrupted():
            tabled.fill(step, self._stepper.put)
            self._begin(step)
            stream, units = self._stream(), iter(self._units)
            for cut in self._cuts:
                self._pass_by(stream, units, Unit("ffn", cut.layer), partial(pieces.launch, cut.number))
                made = cut.experts(*cut.given, None if cut.found is None else partial(self._launched, pieces, cut, cut.found))
                if made is not cut.made:
                    cut.made.copy_(made)
                stream.leave(Unit("ffn", cut.layer))
            pieces.launch(self._count - 1)
            for unit in units:
                stream.enter(unit)
                stream.leave(unit)
            stream.end_pass()
            self._hopped()
        self.steps += 1
        return self._logits.clone()

    def _launched(
        self, pieces: Pieces, cut: _Cut, found: Tabled, experts: Sequence[Parameters | Made], come: Callable[[], object]
    ) -> torch.Tensor | None:
        """What :data:`penstock.runtime.experts.expert_forward.Recorded` says. The card has read the table of the step before: it chose this
        step's experts since."""
        assert found.results is not None or Made not in map(type, experts), "rows are recorded where some are made"
        if not found.table.fill(experts):
            return None
        come()
        pieces.launch(cut.number + 1)
        self.visits += 1
        return cut.made

    @staticmethod
    def _pass_by(stream: WeightStream, units: Iterator[Unit], until: Unit, launch: Callable[[], None]) -> None:
        """Enter and leave ``units`` before ``until``, and enter that one. ``launch`` comes in the last of those that are left."""
        before = []
        for unit in units:
            if unit == until:
                break
            before.append(unit)
        for unit in before:
            stream.enter(unit)
            if unit is before[-1]:
                launch()
            stream.leave(unit)
        stream.enter(until)
        if not before:
            launch()

    def schedule(self) -> None:
        """There is one alone."""

    def make_way(self) -> None:
        """A pass comes that is launched in another way: nothing is held."""

    def settle(self) -> None:
        """Nothing is booked later than others book it."""

    def facts(self) -> dict[str, object]:
        """For the report: rows of a recorded step, or why there is none, its pieces, how many steps were launched, and layers' experts."""
        rows = 0 if self._tabled is None else self._tabled.rows
        return {"rows": rows, "refused": self.refused, "steps": self.steps, "pieces": self._count, "visits": self.visits}

    def stop(self) -> None:
        """The memory is given back."""
        self._tabled, self._cuts, self._tables, self._count, self._logits = None, [], {}, 0, torch.empty(0)
        self._staging.clear()
        if self._pieces is not None:
            self._pieces.close()
            self._pieces = None

    @torch.inference_mode()
    def _capture(self, step: Step) -> None:
        self.stop()
        stepper, pieces, warmed = self._stepper, self._open(), False
        tabled, logits = TabledRows.of(step, stepper), self._logits

        def compute() -> torch.Tensor:
            return stepper.compute_tabled(step, tabled.tables, tabled.numbers, tabled.every)

        try:
            with pieces.warming():
                for _ in range(WARMED):
                    compute()
                with self._model.handed_over(self._met):
                    compute()
            warmed = True
            hops = nullcontext(self._hopped) if self._others is None else self._others.recording(pieces)
            with self._model.handed_over(partial(self._cut_at, pieces)), hops as self._hopped:
                self._count = 1
                logits = pieces.record(compute)
        except RuntimeError as error:
            if self._others is not None and not warmed:
                raise  # others wait for its hidden states
            self.refused = refusal(error)
        if self._others is not None:
            self.refused = self._others.agree(self.refused)
        if self.refused is not None:
            pieces.close()
            self._cuts, self._tables = [], {}
            return
        self._tabled, self._pieces, self._logits = tabled, pieces, logits

    def _met(self, layer: int, experts: LayerExperts) -> Runner:
        """``experts``, with a table for their recorded launch where they may have one: nothing is allocated while one is recorded."""

        def meets(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            found = experts.tabled(self._alias, self._staging, self._results, hidden, weights)
            if found is not None:
                self._tables[layer] = found
            return experts(hidden, index, weights)

        return meets

    def _cut_at(self, pieces: Pieces, layer: int, experts: LayerExperts) -> Runner:
        def ends(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            made, found = torch.empty_like(hidden), self._tables.get(layer)
            self._cuts.append(_Cut(layer, experts, (hidden, index, weights), made, self._count - 1, found))
            self._cut(pieces)
            if found is not None:
                computed = experts.by_table(hidden, weights, found)
                assert computed is not None, "it has a table, since it was computed so before"
                made.copy_(computed)
                self._cut(pieces)
            return made

        return ends

    def _cut(self, pieces: Pieces) -> None:
        pieces.cut()
        self._count += 1
