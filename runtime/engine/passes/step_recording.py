"""Which steps of an engine are recorded, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from penstock.planner.contract.decided.recording import launched_because, staged_bytes
from penstock.runtime.engine.passes.recorded_side import FedStepper, RecordedSide
from penstock.runtime.engine.passes.rehearsal import longest_step
from penstock.runtime.engine.sides.card_side import CardSide
from penstock.runtime.engine.sides.host_side import HostSide
from penstock.runtime.experts.expert_forward import HandedExperts
from penstock.runtime.experts.streamed_experts import Experts
from penstock.runtime.memory.device import CopyDevice, CudaDevice
from penstock.runtime.model.rows import Step
from penstock.runtime.ranks.rank import Rank
from penstock.runtime.recorded.card_pieces import CardPieces
from penstock.runtime.recorded.graph_steps import Others
from penstock.runtime.recorded.piece_steps import PieceSteps
from penstock.runtime.store.decoder import decoder_layers


class StepRecording:
    """Of ``fed``, whose routed ``experts`` come when they are chosen. ``begin_pass`` tells all parts of an engine of a pass.
    ``far_layers``: those whose KV lies outside the device. Steps are recorded only where ``paged`` attention has a kernel."""

    def __init__(
        self,
        fed: FedStepper,
        experts: Experts | None,
        host: HostSide,
        copier: CopyDevice | None,
        rank: Rank | None,
        begin_pass: Callable[[Step], None],
        far_layers: int,
        paged: bool,
    ):
        self._fed, self._experts, self._host, self._copier, self._rank = fed, experts, host, copier, rank
        self._begin_pass, self._far_layers, self._stack = begin_pass, far_layers, ExitStack()
        options = host.options
        self._may = paged and self._alike() and options.graphs is not False and options.wrap_around and not host.arena.refused
        self._recorded: RecordedSide | PieceSteps | None = None
        self._refused: str | None = None

    def record(self, card: CardSide, copier: CopyDevice, rows: int, most_tokens: int) -> None:
        """Decode steps of so many rows, where they are recorded; other ranks do the same at the same time."""
        shapes, others = self._host.options.verify_shapes, None if self._rank is None else self._rank.shared
        host = self._host.placement.weights.host
        beside = frozenset(n for n in (rows, *(shape.all_tokens for shape in shapes)) if host.compute(n))
        if others is not None and isinstance(copier, CudaDevice):
            assert self._rank is not None
            tokens = max([rows, *(shape.all_tokens for shape in shapes)])
            nbytes = self._rank.hop_bytes(tokens, self._fed.model.config.get_text_config(decoder=True).hidden_size)
            self._stack.callback(others.close)
            agreed = others.open(copier, nbytes, self._not_recorded(), shapes, beside)
            self._refused, shapes, beside = agreed.refused, tuple(agreed.shapes), agreed.beside
        if self._refused is None and self._may:
            if self._experts is None:
                self._recorded = RecordedSide(self._fed, self._host, card, copier, rows, most_tokens, shapes, beside, others)
            else:
                self._recorded = self._in_pieces(self._experts, copier, rows, most_tokens, others)
            self._stack.callback(self._recorded.stop)
            self._fed.stepper.graphs = self._recorded.record()
            if self._recorded.refused is not None:
                self.stop()

    def _in_pieces(self, experts: Experts, copier: CopyDevice, rows: int, most_tokens: int, others: Others | None) -> PieceSteps:
        """What records steps between their experts, which are rehearsed."""
        fed = self._fed

        def longest(use: Callable[[Step], None]) -> None:
            with fed.binder.fed_by(fed.rehearsal):
                longest_step(fed.stepper, rows, most_tokens, use)

        return PieceSteps(
            fed.stepper,
            partial(CardPieces, fed.stepper.device),
            HandedExperts(decoder_layers(fed.model)),
            self._host.blocks,
            lambda: fed.binder.stream,
            self._begin_pass,
            longest,
            copier.alias,
            staged_bytes(self._host.placement.model, rows),
            experts.results,
            others,
        )

    def record_still(self) -> None:
        """After :meth:`stop`: steps in which nothing moves, where steps were recorded."""
        if self._recorded is not None and self._fed.stepper.graphs is None:
            self._fed.stepper.graphs = self._recorded.record_still()

    @property
    def records(self) -> bool:
        """Whether steps are launched as a whole, or in pieces."""
        return self._recorded is not None and self._recorded.refused is None

    def _alike(self) -> bool:
        """Whether all decode steps are alike: the host decides nothing in between, what streams lies in DRAM, and the plan has them so."""
        together = isinstance(self._copier, CudaDevice) and (self._rank is None or self._rank.shared is not None)
        return together and not self._host.options.launched and launched_because(self._host.placement, self._far_layers) is None

    @property
    def launched_because(self) -> str | None:
        """Why steps that are alike are launched kernel by kernel; None where they are not, or are not alike."""
        if self._rank is not None and self._rank.shared is None:
            return f"layers are dealt to {self._rank.count} ranks"
        if not self._alike():
            return None
        return self._refused or (self._not_recorded() if self._recorded is None else self._recorded.refused)

    def _not_recorded(self) -> str | None:
        """Why no step is recorded here; None where steps are, or may be."""
        if self._may:
            return None
        if not self._alike():
            return launched_because(self._host.placement, self._far_layers) or "its steps are not alike"
        options = self._host.options
        asked = "engine.graphs=false" if options.graphs is False else "engine.wrap_around=false" if not options.wrap_around else None
        return asked or ("DRAM is not page-locked" if self._host.arena.refused else "Triton is not installed")

    def settle(self) -> None:
        """Book the last step."""
        if self._recorded is not None:
            self._recorded.settle()

    def facts(self) -> dict[str, object] | None:
        """For the report; None where no step is recorded."""
        return None if self._recorded is None else self._recorded.facts()

    def stop(self) -> None:
        """Nothing moves any more."""
        if self._recorded is not None:
            self._recorded.stop()
            self._fed.stepper.graphs = None

    def close(self) -> None:
        """Give memory back. Safe to call twice."""
        self._stack.close()
