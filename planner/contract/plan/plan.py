"""The plan: the one door between planner and runtime. Decisions, what they assume, and what they promise."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.placement import Placement, place
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.lessons.interval import Intervals, intervals
from penstock.planner.contract.prices.cost import Prediction
from penstock.planner.contract.prices.prefill import Prefill
from penstock.planner.contract.prices.reuse import BreakEven, break_even
from penstock.planner.contract.prices.stages import prefill_passes

FORMAT = 2


@dataclass(frozen=True)
class Plan:
    """Decisions for one model on one machine under one workload, with their prediction."""

    hardware: HardwareProfile
    model: ModelSpec
    workload: Workload
    decisions: Decisions
    prediction: Prediction
    """What a run of the plan will show: seconds, bytes a token, bytes of each tier."""
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def break_even(self) -> BreakEven:
        """From how many tokens on restoring the head of a prompt of the workload beats computing it, per tier."""
        return break_even(Prefill(self.hardware, self.model, self.workload, self.decisions))

    @cached_property
    def intervals(self) -> Intervals:
        """Between what nine of ten runs will find the prediction's seconds."""
        return intervals(self.hardware, self.model, self.workload, self.decisions)

    @property
    def passes_s(self) -> dict[str, float]:
        """Phase -> seconds that its passes take beyond every stage (``HardwareProfile.pass_s``): of the prefill, and of one decode step."""
        passes = prefill_passes(self.workload, self.decisions.prefill_chunk_tokens, self.prediction.restored_tokens)
        return {"prefill": passes * self.hardware.pass_s, "decode": self.hardware.pass_s}

    def chunk_tokens(self, together: int) -> int:
        """Prompt tokens of each of ``together`` prompts in one pass. A server's plan has memory for those of one at a time."""
        chunk = self.decisions.prefill_chunk_tokens
        return max(1, chunk // together) if self.workload.is_served else chunk

    @property
    def placement(self) -> Placement:
        return place(self.model, self.decisions.weights, self.hardware.gpu is not None)
