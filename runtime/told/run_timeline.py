"""`runtime run trace=...`: a run's timeline."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.planner.common.timeline.spans import PASS, Sample, Span, Timeline
from penstock.planner.contract.plan.plan import Plan
from penstock.runtime.moving.ledger import Ledger


class PassMarks:
    """Keeps one span for each pass of a generation. Made when the prefill begins; called when a token has been chosen."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._since = ledger.now()

    def token(self, number: int) -> None:
        """Token ``number``, from 1 on, is known: the prefill's is the first one."""
        now = self._ledger.now()
        self._ledger.keep(Span(PASS, f"decode {number - 1}" if number > 1 else "prefill", self._since, now))
        self._since = now


def make_timeline(ledger: Ledger, since: float, samples: Sequence[Sample], plan: Plan) -> Timeline:
    """What ``ledger`` kept of work that began after ``since``; says so when it could not keep everything."""
    spans = [span for span in list(ledger.spans) if span.start >= since]
    title = f"{plan.model.name} on {plan.hardware.name}"
    facts = {"model": plan.model.name, "hardware": plan.hardware.name, "spans_not_kept": ledger.dropped}
    return Timeline(spans, samples, title, facts)
