"""What runs taught of drafts: how often a drafter has a proposal, and how often its tokens are kept, by their places in a chain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from penstock.planner.contract.decided.speculating import Speculation

UNSURE = 8.0
"""Tokens that a default counts as, beside those that were tried."""
ALIKE = 32
"""Tokens at one place of a chain from which on it has a share of its own."""
APART = 2.0
"""Standard deviations that such a share is away from all tokens' one, at least."""


@dataclass(frozen=True)
class DraftLesson:
    """Of one run. ``drafter`` names who drafted, ``text`` the kind of text: the name of the run's workload."""

    drafter: str
    text: str
    asked: int
    """Times that a sequence's drafts were asked for."""
    proposed: int
    """Times that there were any."""
    tried: tuple[int, ...]
    """Of the first, second, ... token of a chain: drafted, and all before it kept."""
    kept: tuple[int, ...]
    step_s: float | None = None
    """Seconds of a token of a chain, where a model drafted for one sequence at a time."""

    @classmethod
    def of(cls, speculation: Speculation, text: str, facts: Mapping[str, Any] | None) -> DraftLesson | None:
        """Of a run's report on its drafts; None where nobody was asked for any."""
        if not facts or not facts["asked"]:
            return None
        tried = tuple(facts["tried_at"])
        kept = (*facts["kept_at"], *[0] * len(tried))[: len(tried)]
        return cls(drafter_name(speculation), text, facts["asked"], facts["proposed"], tried, kept, draft_step_s(speculation, facts))


def draft_step_s(speculation: Speculation, facts: Mapping[str, Any]) -> float | None:
    """Of a run's report on its drafts: seconds of a token of a chain; None where no model drafted, or for several sequences at once."""
    if speculation.model is None or not facts["drafted"] or facts["rows"] != facts["passes"]:
        return None
    return float(facts["draft_s"] / facts["drafted"])


def drafter_name(speculation: Speculation) -> str:
    """Of the pair's one half, whose other half is the model itself."""
    return str(speculation.drafter) if speculation.model is None else f"{speculation.drafter}, {speculation.model.name}"


def counting_on(speculation: Speculation, lessons: Sequence[DraftLesson], text: str) -> Speculation:
    """``speculation`` with the shares that ``lessons`` of its drafter on this kind of ``text`` found; itself where there are none.

    Few tokens weigh little beside what ``speculation`` counts on by default. No share is above the one that was seen.
    """
    own = _own(speculation, lessons, text)
    if not own:
        return speculation
    proposes = sum(lesson.proposed for lesson in own) / sum(lesson.asked for lesson in own)
    tried, kept = _sums([lesson.tried for lesson in own]), _sums([lesson.kept for lesson in own])
    if not sum(tried):
        return replace(speculation, proposes=proposes)
    seen = sum(kept) / sum(tried)
    share = min(seen, (speculation.acceptance * UNSURE + sum(kept)) / (UNSURE + sum(tried)))
    places = tuple(k / n for k, n in zip(kept, tried, strict=True) if n >= ALIKE)
    differ = any(abs(place - seen) > APART * math.sqrt(seen * (1 - seen) / n) for place, n in zip(places, tried, strict=False))
    at = tuple(round(place, 4) for place in places) if differ else ()
    return replace(speculation, acceptance=share, acceptance_at=at, proposes=proposes)


def timed(speculation: Speculation, lessons: Sequence[DraftLesson], rows: int) -> Speculation:
    """``speculation`` with the seconds of a step that ``lessons`` of its drafter found, on text of any kind: the median. Itself where there
    are none, or where it drafts for more ``rows`` than one, as no lesson did."""
    found = [lesson.step_s for lesson in lessons if lesson.drafter == drafter_name(speculation) and lesson.step_s]
    return replace(speculation, step_s=median(found)) if found and rows == 1 else speculation


def stands_on(speculation: Speculation, lessons: Sequence[DraftLesson], text: str) -> str:
    """On which acceptance ``speculation`` counts, in words: ``lessons`` are those that :func:`counting_on` was given."""
    runs, kept = len(_own(speculation, lessons, text)), f"counts on {speculation.acceptance:.0%} of them kept"
    if not runs:
        return f"{kept}, before a run has measured it"
    some = "" if speculation.proposes > 0.995 else f", with a proposal in {speculation.proposes:.0%} of passes"
    return f"{kept}{some}, as {runs} {'run' if runs == 1 else 'runs'} on text of the kind {text!r} measured"


def _own(speculation: Speculation, lessons: Sequence[DraftLesson], text: str) -> list[DraftLesson]:
    return [lesson for lesson in lessons if (lesson.drafter, lesson.text) == (drafter_name(speculation), text)]


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    """Place by place; short rows end in zeros."""
    return [sum(row[k] for row in rows if k < len(row)) for k in range(max(map(len, rows), default=0))]
