"""A timeline in a file: as a Chrome trace or as a picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.output import write_at_once
from penstock.planner.common.timeline.spans import Timeline, chrome_trace
from penstock.planner.common.timeline.timeline_picture import draw

SUFFIXES = {".json": "a Chrome trace, which ui.perfetto.dev opens", ".png": "a picture"}


def check_form(path: Path) -> None:
    """UserError when the ending of ``path`` asks for a form that cannot be written here."""
    if path.suffix not in SUFFIXES:
        choices = " or ".join(f"{suffix} ({what})" for suffix, what in SUFFIXES.items())
        raise UserError(f"trace={path}: must end in {choices}; name the file so")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"trace={path}: a picture needs matplotlib, which is not installed; pip install matplotlib or write a .json")


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the timeline in the form that the file's ending asks for, at once or not at all."""
    if path.suffix == ".png":
        write_at_once(path, "trace", lambda temporary: draw(timeline, temporary))
    else:
        text = json.dumps(chrome_trace(timeline), separators=(",", ":"))
        write_at_once(path, "trace", lambda temporary: temporary.write_text(text, encoding="utf-8"))
