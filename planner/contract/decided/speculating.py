"""Tokens that are drafted, to be verified by the pass that would have given one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from penstock.planner.contract.decided.allowed import OneOf, Span
from penstock.planner.contract.decided.decision import Decision

MOST_DRAFTS = 15
"""Tokens of a chain: with the token before them as many rows as AMX multiplies for the price of one."""


class Drafter(StrEnum):
    """Who proposes the tokens that a pass verifies."""

    none = "none"
    """Nobody: a pass gives each sequence one token."""
    lookup = "lookup"
    """The sequence itself: what followed the last time that its latest tokens occurred. Takes no weights."""


class Speculate(StrEnum):
    """Who is asked to draft."""

    none = "none"
    """Nobody."""
    auto = "auto"
    """Who gives the most tokens a second, if anybody does."""
    lookup = "lookup"
    """The sequence itself: what followed the last time that its latest tokens occurred."""


DEFAULT_ACCEPTANCE = {Drafter.lookup: 0.3}
"""What a plan counts on before a run has measured it. Of lookup on prose 0.2 to 0.4 are published, on edits 0.7 and more
(https://arxiv.org/abs/2401.07851, table 3)."""


@dataclass(frozen=True)
class Speculation:
    """A pass computes up to ``tokens`` drafted tokens behind each sequence's last one, and keeps those that it would have chosen."""

    drafter: Annotated[Drafter, Decision(OneOf(tuple(Drafter)), None, "drafts", "by {}")] = Drafter.none
    """Who drafts."""
    tokens: Annotated[int, Decision(Span(0, MOST_DRAFTS), "force.speculate_tokens", "drafts", "{} tokens")] = 0
    """Tokens of a chain at most; while it runs, a chain is as long as pays by what is kept."""
    acceptance: Annotated[float, Decision(Span(0.0, 1.0), None, "drafts", "{} kept", aside=True)] = 0.0
    """The share of drafted tokens that the plan counts on, of those whose forerunners are kept."""


def as_asked(planned: Speculation, asked: Speculate | None) -> Speculation:
    """What a run drafts by a plan with ``planned``, where its user wants ``asked``; None: what the plan has."""
    if asked is None or (asked is not Speculate.none and planned.drafter is not Drafter.none):
        return planned
    if asked is Speculate.none:
        return Speculation()
    return Speculation(Drafter.lookup, planned.tokens or MOST_DRAFTS, DEFAULT_ACCEPTANCE[Drafter.lookup])
