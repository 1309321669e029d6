"""What an export is: the text for the other engine, and what of the plan it could not say."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.planner.common.measures import show_rate
from penstock.planner.contract.plan.plan import Plan

WIDTH = 120
"""Columns of a comment."""


@dataclass(frozen=True)
class Lost:
    """A decision that the target cannot express, and what it does in its place."""

    decided: str
    instead: str
    tokens_per_s: float | None
    """Predicted of the plan with this alone changed; None where the planner cannot say, for the reason in ``unpredicted``."""
    unpredicted: str = ""


@dataclass(frozen=True)
class Request:
    """What a target is asked for."""

    plan: Plan
    plan_name: str


@dataclass(frozen=True)
class Losses:
    """What a target cannot express."""

    lost: tuple[Lost, ...]
    together_tokens_per_s: float | None
    """Predicted of the plan with all that could be predicted changed; None where the target cannot run it on this machine."""
    cannot_run: str = ""
    """Why, where it cannot."""

    def lines(self, request: Request) -> list[str]:
        """The head of an export, without comment signs, each at most ``WIDTH`` columns."""
        plan, own = request.plan, request.plan.prediction.decode_tokens_per_s
        said = [
            f"{request.plan_name}: {plan.model.name} on {plan.hardware.name}, workload {plan.workload.name}, batch {plan.decisions.batch}. "
            f"`runtime run` is predicted {show_rate(own)} tokens/s."
        ]
        if self.lost:
            said.append("Not expressed here, and what is predicted with that alone done this engine's way:")
            said += [f"- {lost.decided}: {lost.instead}. {cost(lost, own)}" for lost in self.lost]
        if self.cannot_run:
            said.append(f"This engine cannot run the plan as it is on this machine: {self.cannot_run}")
        elif self.together_tokens_per_s is not None:
            together = _beside(self.together_tokens_per_s, own)
            said.append(f"All that could be predicted together: {together}, by this plan's rates, the engine's own overheads left out.")
        return [line for text in said for line in textwrap.wrap(text, WIDTH - 2, subsequent_indent="  " if text.startswith("-") else "")]


@dataclass(frozen=True)
class Exported:
    """``text`` is complete, with the losses as its comments."""

    text: str
    losses: Losses


@dataclass(frozen=True)
class Target:
    """One engine that a plan can be written for."""

    name: str
    summary: str
    ending: str
    """Of the file, after the plan's own name."""
    export: Callable[[Request], Exported]


def cost(lost: Lost, own: float) -> str:
    """What ``lost`` costs beside the plan's ``own`` tokens/s, in words."""
    return f"Not predicted: {lost.unpredicted}" if lost.tokens_per_s is None else _beside(lost.tokens_per_s, own)


def _beside(tokens_per_s: float, own: float) -> str:
    change = tokens_per_s / own - 1
    return f"{show_rate(tokens_per_s)} tokens/s ({'no change' if abs(change) < 0.005 else f'{change:+.0%}'})"


def json_text(request: Request, losses: Losses, document: Mapping[str, Any]) -> str:
    """``document`` as JSON, with the comment as its first key, since JSON has none of its own."""
    return json.dumps({"comment": losses.lines(request), **document}, indent=1, ensure_ascii=False) + "\n"
