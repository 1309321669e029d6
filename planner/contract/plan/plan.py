"""The plan: the one door between planner and runtime. Decisions, what they assume, and what they promise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from penstock.planner.contract.bills.cost import Prediction, as_drafting, predict
from penstock.planner.contract.bills.prefill import Prefill
from penstock.planner.contract.bills.reuse import BreakEven, break_even
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.placement import Placement, place
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.workload import Workload
from penstock.planner.contract.lessons.interval import Intervals, intervals
from penstock.planner.contract.plan.plan_ranks import Ranks
from penstock.planner.contract.plan.rank_predictions import paced, predict_each, rank_terms
from penstock.planner.contract.prices.stages import prefill_passes
from penstock.planner.contract.ranks.dealing import Dealing
from penstock.planner.contract.speculation.resident_drafter import resident

FORMAT = 2


@dataclass(frozen=True)
class Plan:
    """Decisions for one model on one machine under one workload, with their prediction.

    A plan of several ranks is a plan for each of them: ``hardware`` and ``model`` are whole, ``decisions`` are the first rank's, and
    :meth:`of_rank` is what one of them runs.
    """

    hardware: HardwareProfile
    model: ModelSpec
    workload: Workload
    decisions: Decisions
    prediction: Prediction
    """What a run of the plan will show: seconds, bytes a token, bytes of each tier. Of several ranks: ``predict_ranks``."""
    notes: tuple[str, ...] = field(default=())
    ranks: Ranks = Ranks()

    def of_rank(self, rank: int) -> Plan:
        """The ordinary plan of ``rank``: its layers and rows of the LM head, its card and its share of the rest. It promises its own bytes
        and the seconds of all ranks together. Itself where there is one. ValueError for a rank that is none."""
        if not 0 <= rank < self.ranks.count:
            raise ValueError(f"rank {rank} of a plan of {self.ranks.count}")
        return self.each_rank[rank]

    @property
    def dealing(self) -> Dealing:
        """Which rank has which layers."""
        return self.ranks.dealing(self.model.layers)

    @cached_property
    def each_rank(self) -> tuple[Plan, ...]:
        """:meth:`of_rank` of all, in their order."""
        if self.ranks.count == 1:
            return (self,)
        terms = rank_terms(self.hardware, self.model, self.workload, self.ranks.decided(self.decisions), self.dealing)
        each = predict_each(terms)
        return tuple(
            replace(self, hardware=hardware, model=model, decisions=decisions, prediction=paced(own, each), ranks=Ranks())
            for (hardware, model, _, decisions), own in zip(terms, each, strict=True)
        )

    @cached_property
    def break_even(self) -> BreakEven:
        """From how many tokens on restoring the head of a prompt of the workload beats computing it, per tier."""
        first = self.of_rank(0)
        return break_even(Prefill(first.hardware, first.model, first.workload, first.decisions))

    @cached_property
    def intervals(self) -> Intervals:
        """Between what nine of ten runs will find the prediction's seconds."""
        first = self.of_rank(0)
        return intervals(first.hardware, first.model, first.workload, first.decisions)

    @cached_property
    def drafter(self) -> Plan | None:
        """Of the model that drafts, by itself: all of it stays where it computes, of several ranks with the first one. None where no model
        drafts."""
        if self.ranks.count > 1:
            return self.of_rank(0).drafter
        model = self.decisions.speculation.model
        if model is None:
            return None
        decisions = resident(model, self.decisions, self.model.layers, self.hardware.gpu is not None)
        hardware = as_drafting(self.hardware)
        return Plan(hardware, model, self.workload, decisions, predict(hardware, model, self.workload, decisions))

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
        """Of the first rank, where there are several."""
        return place(self.of_rank(0).model, self.decisions.weights, self.hardware.gpu is not None)
