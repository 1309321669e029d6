"""Passes with prompts of an engine in which nothing moves: recorded as the plan has them, or why they are not."""

from __future__ import annotations

from functools import partial

from penstock.runtime.engine.passes.recorded_side import FedStepper
from penstock.runtime.engine.passes.rehearsal import prompt_pass
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.memory.device import CopyDevice, CudaDevice
from penstock.runtime.model.rows import Step
from penstock.runtime.recorded.card_pieces import CardPieces
from penstock.runtime.recorded.prompts.prompt_layers import PromptLayers
from penstock.runtime.store.decoder import decoder_layers


class PromptRecording:
    """Of ``fed``, in passes of ``options.prompt_tokens``; 0: the plan has none recorded."""

    def __init__(self, fed: FedStepper, copier: CopyDevice | None, options: EngineOptions):
        self._fed, self._asked = fed, options.prompt_tokens
        self._layers: PromptLayers | None = None
        self._why: str | None = None
        if options.graphs is False:
            self._why = "engine.graphs=false"
        elif not isinstance(copier, CudaDevice) or fed.stepper.paged is None:
            self._why = "there is no CUDA card here, or the model attends by code of its own"

    def record(self, rows: int, most_tokens: int) -> None:
        """Where the plan has it so. ``rows`` sequences of ``most_tokens`` have room; other ranks do the same at the same time."""
        stepper, tokens = self._fed.stepper, min(self._asked, rows * most_tokens)
        if not tokens or self._why is not None or stepper.paged is None:
            return
        self._layers = layers = PromptLayers(decoder_layers(self._fed.model), stepper.paged, CardPieces(stepper.device))
        with self._fed.binder.fed_by(self._fed.rehearsal):
            prompt_pass(stepper, rows, most_tokens, tokens, lambda step: layers.record(partial(stepper.run, step)))
        self._why = layers.refused

    def begin_pass(self, step: Step) -> None:
        """``step`` comes next."""
        if self._layers is not None:
            self._layers.begin_pass(step)

    @property
    def launched_because(self) -> str | None:
        """Why prompts are launched kernel by kernel that the plan has recorded; None where there are none."""
        return self._why if self._asked else None

    def facts(self) -> dict[str, object] | None:
        """For the report: tokens of a recorded pass, or why there is none, and how many layers were launched so. None where the plan has
        none recorded."""
        if not self._asked:
            return None
        tokens, launched = (0, 0) if self._layers is None else (self._layers.tokens, self._layers.launched)
        return {"tokens": tokens, "refused": self._why, "layers": launched}

    def close(self) -> None:
        """Give memory back. Safe to call twice."""
        if self._layers is not None:
            self._layers.stop()
