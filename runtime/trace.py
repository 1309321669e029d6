"""`runtime run trace=...`: the run's timeline in a file, as a Chrome trace or as a picture."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from planner.errors import UserError
from planner.output import write_at_once
from planner.plan import Plan
from planner.timeline import draw
from planner.trace import PASS, Sample, Span, Timeline, chrome_trace
from runtime.ledger import Ledger

SUFFIXES = {".json": "a Chrome trace, which ui.perfetto.dev opens", ".png": "a picture"}


def check_form(path: Path) -> None:
    """UserError when the ending of ``path`` asks for a form that cannot be written here."""
    if path.suffix not in SUFFIXES:
        choices = " or ".join(f"{suffix} ({what})" for suffix, what in SUFFIXES.items())
        raise UserError(f"trace={path}: must end in {choices}; name the file so")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"trace={path}: a picture needs matplotlib, which is not installed; pip install 'penstock[plot]' or write a .json")


class PassMarks:
    """Keeps one span for each pass of a generation. Made when the prefill begins; told when a token has been chosen."""

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


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the timeline in the form that the file's ending asks for, at once or not at all."""
    if path.suffix == ".png":
        write_at_once(path, "trace", lambda temporary: draw(timeline, temporary))
    else:
        text = json.dumps(chrome_trace(timeline), separators=(",", ":"))
        write_at_once(path, "trace", lambda temporary: temporary.write_text(text, encoding="utf-8"))
