"""What a little more or less of each resource is worth: the best plan found again on a machine that has it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.prices.sizes import unit_dram_bytes
from penstock.planner.explain.resources import Resource, resources
from penstock.planner.explain.side_by_side import side_by_side
from penstock.planner.solver.layer_counts import fastest
from penstock.planner.solver.program import Optimum
from penstock.planner.solver.terms.problem import Question

NOTICEABLE = 5e-4
"""Least share of the best time that counts as a gain or a loss: below it, two solves are taken as equal."""


@dataclass(frozen=True)
class Margin:
    """The best plan with ``step`` more and less of a resource of which there is ``amount``, all in its unit. Decode seconds are per token
    of any sequence."""

    resource: Resource
    amount: float
    step: float
    base: Optimum
    more: Optimum | None
    less: Optimum | None
    """None: no plan fits any more."""

    @property
    def gained_s(self) -> float:
        """Seconds per token that the step up saves."""
        return self.base.token_s - self.more.token_s if self.more else 0.0

    @property
    def lost_s(self) -> float | None:
        """Seconds per token that the step down costs; None where no plan fits any more."""
        return None if self.less is None else self.less.token_s - self.base.token_s

    @property
    def value_s(self) -> float:
        """Seconds per token for one unit more: the step's gain, shared out evenly."""
        return self.gained_s / self.step

    @property
    def gain(self) -> float:
        """Share of what is minimised that the step up saves."""
        return 1 - self.more.total_s / self.base.total_s if self.more else 0.0

    @property
    def loss(self) -> float | None:
        """Share of what is minimised that the step down costs."""
        return None if self.less is None else self.less.total_s / self.base.total_s - 1

    @property
    def binds(self) -> bool:
        """Whether more of it is faster."""
        return self.gain > NOTICEABLE

    @property
    def needed(self) -> bool:
        """Whether less of it is slower, or no plan."""
        return self.loss is None or self.loss > NOTICEABLE


def margins(question: Question, base: Optimum, share: float, advance: Callable[[], None] = lambda: None) -> tuple[Margin, ...]:
    """One for each resource, with a step of ``share`` of it. Two solves each; ``advance`` is called after each solve."""
    steps = []
    for resource in resources(question.hardware, question.model):
        amount = resource.of(question.hardware)
        steps.append((resource, amount, step_of(resource, amount, question.model, share)))

    def end(given: tuple[Resource, float]) -> Optimum | None:
        resource, changed = given
        hardware = resource.with_amount(question.hardware, changed) if changed > 0 else None
        return fastest(question.on(hardware)) if hardware else None

    ends = side_by_side(end, [(resource, changed) for resource, at, by in steps for changed in (at + by, at - by)], advance)
    return tuple(Margin(*one, base, more, less) for one, more, less in zip(steps, ends[::2], ends[1::2], strict=True))


def step_of(resource: Resource, amount: float, model: ModelSpec, share: float) -> float:
    """``share`` of the amount. Of a capacity: whole GB, enough for one layer, because a part of one gains nothing, and no more than
    half."""
    if not resource.is_capacity:
        return share * amount
    layer = (unit_dram_bytes(model.attn_max) + unit_dram_bytes(model.ffn_max)) / GB
    return min(float(math.ceil(max(layer, share * amount))), amount / 2)
