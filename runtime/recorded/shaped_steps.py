"""Steps of one schedule, recorded in several shapes: one token of each row, and chains of drafts behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.runtime.model.rows import Step
from penstock.runtime.recorded.graph_steps import GraphSteps


class ShapedSteps:
    """Runs a step by the smallest of ``decode`` and ``verify`` that serves it. Shapes of the same ``turns`` go on from each other; to move
    to one of others takes one fill of the ring's slots."""

    def __init__(self, decode: GraphSteps, verify: Sequence[GraphSteps] = ()):
        self._decode = self._now = decode
        self._shapes = sorted((decode, *verify), key=lambda steps: steps.rows * steps.tokens)

    @property
    def refused(self) -> str | None:
        """Why steps are launched one kernel after the other; None where they are not."""
        return self._decode.refused

    @property
    def steps(self) -> int:
        """Of one token a row, that were launched as a whole."""
        return self._decode.steps

    def serves(self, step: Step) -> bool:
        """Whether :meth:`run` can compute ``step``."""
        return any(shape.serves(step) for shape in self._shapes)

    def run(self, step: Step) -> torch.Tensor:
        """Compute ``step``, which :meth:`serves` -> the wanted logits [step.wanted, vocab] on the device."""
        wanted = next(shape for shape in self._shapes if shape.serves(step))
        if wanted is not self._now:
            self._now.settle()
            if wanted.turns is not self._now.turns:
                self._now.make_way()
            self._now = wanted
        return wanted.run(step)

    def make_way(self) -> None:
        """A pass comes that is launched in another way."""
        self._now.make_way()

    def settle(self) -> float | None:
        """Book the last step -> its seconds, where each row had one token: those of others say nothing of a schedule."""
        seconds = self._now.settle()
        return seconds if self._now is self._decode else None

    def facts(self) -> dict[str, object]:
        """For the report."""
        return self._decode.facts()
