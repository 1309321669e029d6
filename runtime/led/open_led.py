"""One session of a rank that is led, from its opening to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.planner.common.outside.card_errors import CardFailed
from penstock.runtime.asked.page_room import unplanned_dram_bytes
from penstock.runtime.company.company import Company
from penstock.runtime.engine.open_session import open_session
from penstock.runtime.engine.sides.engine_options import EngineOptions
from penstock.runtime.led.led_session import LedSession
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.cuda import told_in_one_line
from penstock.runtime.memory.groundwork import Groundwork
from penstock.runtime.ranks.followers import follow
from penstock.runtime.ranks.opening import accept


def follow_one(company: Company, words: dict[str, Any], checkpoint: Path | None, failed: Callable[[BaseException], None]) -> None:
    """Open what rank 0 opens, follow it, and give all back. Nothing where this rank refused. ``failed`` hears at once, on any thread, that
    the card does: to give back what it holds may take for ever, and rank 0 hears of a card that is full before it has loaded."""
    opening = accept(company, words, checkpoint)
    if opening is None:
        return
    beside = 0 if opening.reuse is None else unplanned_dram_bytes(opening.reuse, opening.plan, company.rank)
    with Groundwork.of(opening.plan, beside, company) as ground:
        device = ground.open_card(failed)
        with open_session(opening.plan, opening.checkpoint, ground, EngineOptions(**opening.options), opening.reuse) as session:
            try:
                with told_in_one_line(Budget.of(session.own), device):
                    follow(company, LedSession(session))
            except CardFailed as error:
                failed(error)
                raise
    company.answer({"closed": True})
