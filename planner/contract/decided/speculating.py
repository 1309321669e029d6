"""Tokens that are drafted, to be verified by the pass that would have given one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.allowed import Each, Span
from penstock.planner.contract.decided.decision import Decision, Given
from penstock.planner.contract.given.model import ModelSpec

MOST_DRAFTS = 15
"""Tokens of a chain: with the token before them as many rows as AMX multiplies for the price of one."""

MOST_STEP_S = 3600.0
"""Of a drafter for one token: beyond that a figure is no time."""


class Drafter(StrEnum):
    """Who proposes the tokens that a pass verifies."""

    none = "none"
    """Nobody: a pass gives each sequence one token."""
    lookup = "lookup"
    """The sequence itself: what followed the last time that its latest tokens occurred. Takes no weights."""
    draft = "draft"
    """A smaller model with the same tokens, which stays where it computes."""
    self = "self"
    """The model's own copy in 4 bits, which stays where it computes."""
    mtp = "mtp"
    """The model's own heads that predict further tokens, which stay where they compute."""

    @property
    def has_weights(self) -> bool:
        """Whether it is a model, which takes memory."""
        return self in (Drafter.draft, Drafter.self, Drafter.mtp)


class Speculate(StrEnum):
    """Who is asked to draft."""

    none = "none"
    """Nobody."""
    auto = "auto"
    """Who gives the most tokens a second, if anybody does."""
    lookup = "lookup"
    """The sequence itself: what followed the last time that its latest tokens occurred."""
    draft = "draft"
    """A smaller model with the same tokens."""
    self = "self"
    """The model's own copy in 4 bits."""
    mtp = "mtp"
    """The model's own heads that predict further tokens, as DeepSeek-V3 and GLM-4.5 have."""


DEFAULT_ACCEPTANCE = {Drafter.lookup: 0.3, Drafter.draft: 0.6, Drafter.self: 0.8, Drafter.mtp: 0.7}
"""What a plan counts on before a run has measured it. Of lookup on prose 0.2 to 0.4 are published, on edits 0.7 and more
(https://arxiv.org/abs/2401.07851, table 3). Of small models that draft for large ones greedily 0.61 to 0.82
(https://arxiv.org/abs/2211.17192, table 3). Of 4-bit weights more than 0.9 (https://arxiv.org/abs/2502.10424), by better quantisers than
rounding to the nearest. Of a further head's first token 0.85 to 0.9 (https://arxiv.org/abs/2412.19437, section 5.4.3); of those that the
same head goes on with, fewer."""


@dataclass(frozen=True)
class Speculation:
    """A pass computes up to ``tokens`` drafted tokens behind each sequence's last one, and keeps those that it would have chosen."""

    drafter: Annotated[Drafter, Decision(lambda s: s.drafters, None, "drafts", "by {}")] = Drafter.none
    """Who drafts."""
    tokens: Annotated[int, Decision(Span(0, MOST_DRAFTS), "force.speculate_tokens", "drafts", "{} tokens")] = 0
    """Tokens of a chain at most; while it runs, a chain is as long as pays by what is kept."""
    acceptance: Annotated[float, Decision(Span(0.0, 1.0), None, "drafts", "{} kept", aside=True)] = 0.0
    """The share of drafted tokens that the plan counts on, of those whose forerunners are kept."""
    model: Annotated[ModelSpec | None, Given] = None
    """That drafts; None where no weights do. It stays whole in VRAM, without a GPU in DRAM, and so do its K and V."""
    acceptance_at: Annotated[tuple[float, ...], Decision(Each(Span(0.0, 1.0)))] = ()
    """The same of the first, second, ... token of a chain, where runs found them to differ."""
    proposes: Annotated[float, Decision(Span(0.0, 1.0))] = 1.0
    """The share of passes in which the drafter has a proposal, of those in which it is asked."""
    step_s: Annotated[float, Decision(Span(0.0, MOST_STEP_S))] = 0.0
    """Seconds in which the model that drafts made a token of a chain, as runs found them; 0 without such runs, where its price counts."""

    @property
    def beside(self) -> Speculation:
        """Of ranks beside the first one, which alone has a model that drafts: they verify as many tokens, and hold no
        more than where nobody's weights draft."""
        return self if self.model is None else replace(self, drafter=Drafter.lookup, model=None, step_s=0.0)


def modelled(planned: Speculation, asked: Speculate | None, model: ModelSpec, target: ModelSpec) -> Speculation:
    """What a run drafts where its user gives ``model``, for ``target``, in place of the drafter that was ``planned``. UserError where
    ``asked`` has no use for it."""
    if asked in (Speculate.none, Speculate.lookup, Speculate.mtp):
        raise UserError(f"draft={model.checkpoint}: speculate={asked} drafts without a model; set speculate=draft, or leave draft= out")
    found = kind_of(model, target)
    if asked is Speculate.self and found is not Drafter.self:
        raise UserError(f"draft={model.checkpoint}: it is no copy of {target.name}, whose layers and widths differ; set speculate=draft")
    kind = Drafter.draft if asked is Speculate.draft else found
    return Speculation(kind, planned.tokens or MOST_DRAFTS, DEFAULT_ACCEPTANCE[kind], model)


def kind_of(model: ModelSpec, target: ModelSpec) -> Drafter:
    """What ``model`` is to ``target``: a copy of it has its layers and widths."""
    widths = ("layers", "hidden", "vocab", "attn_width", "kv_width", "ffn_width")
    return Drafter.self if all(getattr(model, name) == getattr(target, name) for name in widths) else Drafter.draft


def as_asked(planned: Speculation, asked: Speculate | None) -> Speculation:
    """What a run drafts by a plan with ``planned``, where its user wants ``asked``; None: what the plan has. UserError for a model that the
    plan has not."""
    if asked is None or (asked is Speculate.auto and planned.drafter is not Drafter.none) or asked.value == planned.drafter.value:
        return planned
    if asked is Speculate.none:
        return Speculation()
    if asked is Speculate.mtp:
        raise UserError("speculate=mtp: the plan has no room for the model's further heads; solve again with speculate=mtp")
    if asked in (Speculate.draft, Speculate.self):
        raise UserError(f"speculate={asked}: the plan has no such drafter; solve again with speculate={asked} draft=DIR, or set draft=DIR")
    return Speculation(Drafter.lookup, planned.tokens or MOST_DRAFTS, DEFAULT_ACCEPTANCE[Drafter.lookup])
