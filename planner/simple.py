"""Whether a plan is worth more than a simple one on every machine that this one may be."""

from __future__ import annotations

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
        """Whether more is promised than a machine that is as likely would give."""
        return self.promised > CLAIM and self.worst <= 0


def gain(hardware: HardwareProfile, model: ModelSpec, workload: Workload, chosen: Decisions, simple: Decisions) -> Gain:
    """Of ``chosen`` over ``simple`` in the objective, both on the same machine, whatever that is: with one figure after the other at either
    end of what runs find of it, and with each at the end that is worse for ``chosen``. Costs 32 predictions."""

    def on(by: dict[Figure, float]) -> float:
        machine = slowed(hardware, by)
        seconds = (predict(machine, model, workload, decisions).total_s for decisions in (chosen, simple))
        return 1 - next(seconds) / next(seconds)

    promised = on({})
    ends: dict[Figure, float] = {}
    each = []
    for figure in Figure:
        share = 1 + spread(hardware, figure)
        found = {by: on({figure: by}) for by in (share, 1 / share)}
        ends[figure] = min(found, key=found.__getitem__)
        each += found.values()
    return Gain(promised, min(promised, on(ends), *each))
