"""A session that does what rank 0's does."""

from __future__ import annotations

from typing import Any

from penstock.runtime.engine.session import Session
from penstock.runtime.model.rows import Step
from penstock.runtime.told.rank_links import led_links, led_round_trips
from penstock.runtime.told.rank_report import rank_report
from penstock.runtime.told.stage_clock import StageClock


class LedSession:
    """``session`` of a rank that follows; its first passes are rehearsals."""

    def __init__(self, session: Session):
        self._session = session
        self._clock = StageClock(session.engine)
        self._is_loaded, self._widest = False, 0
        """Tokens of the largest pass that was rehearsed."""
        session.engine.begin_loading()
        session.engine.compute_from_anywhere()

    def run(self, step: Step) -> None:
        """Compute what rank 0 computes."""
        if not self._is_loaded:
            self._widest = max(self._widest, sum(len(row.tokens) for row in step.rows))
        self._session.engine.stepper.run(step)

    def forget(self, sequence: int) -> None:
        """``sequence`` has ended."""
        self._session.engine.stepper.forget(sequence)

    def pretend(self, sequence: int, tokens: int) -> None:
        """A rehearsal takes so many tokens for computed."""
        self._session.engine.stepper.pretend(sequence, tokens)

    def finish_loading(self, longest: tuple[int, int]) -> None:
        """Rehearsals are over; ``longest`` as rank 0's engine has it."""
        self._session.engine.longest = longest
        self._session.engine.warm_up_experts(self._widest)
        self._is_loaded = True
        self._session.finish_loading()

    def book(self, phase: str) -> None:
        """What was done since the last call belongs to ``phase``."""
        self._clock.book(phase)

    def links(self, alone: int | None) -> dict[str, Any]:
        """What this rank's link gives."""
        return led_links(self._session, alone)

    def round_trips(self, nbytes: int, rounds: int) -> None:
        """Pass on hidden states, while the link is busy."""
        led_round_trips(self._session, nbytes, rounds)

    def pages(self, words: dict[str, Any]) -> dict[str, Any] | None:
        """Do with kept pages what rank 0 does -> the answer, where it waits for one."""
        assert self._session.led_pages is not None, "all ranks keep pages, or none"
        return self._session.led_pages.do(words)

    def report(self) -> dict[str, Any]:
        """What this rank did, and what it took."""
        return rank_report(self._session, self._clock)
