"""Whether a plan is worth more than a simple one on every machine that this one may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from planner.corrections import Figure, slowed
from planner.cost import predict
from planner.decisions import Decisions
from planner.hardware import HardwareProfile
from planner.model import ModelSpec
from planner.spread import spread
from planner.workload import Workload

CLAIM = 0.005
"""A plan that promises less than this over the simple one does not promise to be faster: it takes less memory, which is certain."""


@dataclass(frozen=True)
class Gain:
    """Share of the simple plan's seconds that another one saves: as the profile has it, and at worst."""

    promised: float
    worst: float

    @property
    def doubtful(self) -> bool:
        """Whether a machine that is within what is known of this one might give nothing of what is promised."""
        return self.promised > CLAIM and self.worst <= 0


def gain(hardware: HardwareProfile, model: ModelSpec, workload: Workload, chosen: Decisions, simple: Decisions) -> Gain:
    """Of ``chosen`` over ``simple`` in the objective, both on the same machine, whatever that is. What is lost with one figure after the
    other at the end of what runs find of it that is worse for ``chosen`` adds up as squares do: figures are off independently. Costs 30
    predictions."""

    def on(by: Mapping[Figure, float]) -> float:
        machine = slowed(hardware, by)
        mine, its = (predict(machine, model, workload, decisions).total_s for decisions in (chosen, simple))
        return 1 - mine / its

    promised, squares = on({}), 0.0
    for figure in Figure:
        share = 1 + spread(hardware, figure)
        squares += max(0.0, promised - on({figure: share}), promised - on({figure: 1 / share})) ** 2
    return Gain(promised, promised - math.sqrt(squares))
