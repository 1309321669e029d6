"""The interval of a prediction: the same plan on the machine with every figure at its fast end, and at its slow end."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.given.figures import Figure
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.lessons.corrections import slowed
from penstock.planner.contract.lessons.spread import spread

Range = tuple[float, float]


@dataclass(frozen=True)
class Intervals:
    """(least, most) of the predicted seconds, for nine of ten runs."""

    load_s: Range
    prefill_s: Range
    decode_s_per_token: Range
    total_s: Range


def intervals(hardware: HardwareProfile, model: ModelSpec, workload: Workload, decisions: Decisions) -> Intervals:
    """The intervals of the prediction for ``decisions``. They are rather too wide: all figures rarely err the same way. Mostly one figure
    counts, because a phase lasts as long as its slowest stage. Costs three predictions."""
    shares = {figure: 1 + spread(hardware, figure) for figure in Figure}
    machines = (
        slowed(hardware, {figure: 1 / share for figure, share in shares.items()}),
        hardware,
        slowed(hardware, shares),
    )
    found = [predict(machine, model, workload, decisions) for machine in machines]

    def range_of(name: str) -> Range:
        values = [getattr(prediction, name) for prediction in found]
        return min(values), max(values)

    return Intervals(*(range_of(name) for name in Intervals.__dataclass_fields__))
