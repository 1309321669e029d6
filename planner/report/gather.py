"""What lies in a directory of sweeps: one row for each plan, each run and each point that failed."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.planner.common.command.overrides import key_of, unquoted
from penstock.planner.common.command.sweep_folders import OUTPUT, POINT, SWEEP_CONFIG, read_point
from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan

SILENT = "ended without a word: it was killed, or is still at work"
"""The row of a point that left nothing."""


@dataclass(frozen=True)
class Row:
    """One plan, one run, or one point that is neither."""

    path: str
    """Of its file, or of its directory where it left none; relative to the directory that was gathered."""
    kind: str
    """``plan``, ``run`` or ``failed``."""
    verb: str = ""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Override by override, what the point was asked."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Hardware, model, workload, batch and policy, as far as they are known."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    def best(self, figure: str) -> float | None:
        """``figure`` as measured, else as predicted."""
        value = self.measured.get(figure)
        return self.predicted.get(figure) if value is None else value


@dataclass(frozen=True)
class Gathered:
    """Everything found in ``directory``. ``left_out`` are the files that are neither plans nor runs."""

    directory: Path
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]

    @property
    def swept(self) -> list[str]:
        """Keys that points of one verb were asked differently, in order."""
        swept: dict[str, None] = {}
        for verb in dict.fromkeys(row.verb for row in self.rows if row.verb):
            asked = [row.asked for row in self.rows if row.verb == verb]
            keys = dict.fromkeys(key for overrides in asked for key in overrides)
            swept |= {key: None for key in keys if len({overrides.get(key) for overrides in asked}) > 1}
        return list(swept)


def gather(directory: Path, own: frozenset[str] = frozenset()) -> Gathered:
    """Rows of ``directory`` and all below it, but for the file names ``own``. Raises UserError where there is nothing to gather."""
    if not directory.is_dir():
        raise UserError(f"dir={directory}: no such directory; name one that a --multirun wrote, such as sweeps/0")
    rows: list[Row] = []
    left_out: list[str] = []
    for here in _directories(directory):
        rows += _rows_of(here, directory, own, left_out)
    if not rows:
        raise UserError(f"dir={directory}: holds no plan and no run; fill it with `planner solve --multirun` or `runtime run --multirun`")
    return Gathered(directory, tuple(rows), tuple(left_out))


def _directories(directory: Path) -> Iterator[Path]:
    """``directory`` and those below it, numbers in their own order; hidden ones belong to launchers."""
    yield directory
    below = [entry for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    for entry in sorted(below, key=lambda e: (int(e.name) if e.name.isdigit() else -1, e.name)):
        yield from _directories(entry)


def _rows_of(here: Path, root: Path, own: frozenset[str], left_out: list[str]) -> Iterator[Row]:
    point = read_point(here / POINT)
    asked = {key_of(o): unquoted(o.partition("=")[2]) for o in point.overrides} if point else {}
    found = []
    for path in sorted(entry for entry in here.iterdir() if entry.is_file() and not entry.name.startswith(".")):
        name = os.path.relpath(path, root)
        if path.name in own or path.name == SWEEP_CONFIG or (path.name in (POINT, OUTPUT) and point):
            continue
        row = _plan_row(path, name) if path.suffix in (".yaml", ".yml") else _run_row(path, name, asked, root)
        if row is None:
            left_out.append(name)
        else:
            found.append(dataclasses.replace(row, verb=point.verb if point else "", asked=asked))
    yield from found
    name = os.path.relpath(here, root)
    if point and point.error is not None and not any(row.error for row in found):
        yield Row(name, "failed", point.verb, asked, error=point.error)
    elif point is None and not found and here.name.isdigit() and (here.parent / SWEEP_CONFIG).is_file():
        yield Row(name, "failed", error=SILENT)


def _plan_row(path: Path, name: str) -> Row | None:
    text = path.read_text(encoding="utf-8", errors="replace")
    if not any(line.startswith("penstock:") for line in text.splitlines()):
        return None
    try:
        plan = read_plan(path)
    except UserError as error:
        return Row(name, "failed", error=str(error))
    predicted = {key: value for key, value in vars(plan.prediction).items() if not isinstance(value, dict)}
    return Row(name, "plan", facts=_facts(plan), predicted={key: _plain(value) for key, value in predicted.items()})


def _run_row(path: Path, name: str, asked: Mapping[str, str], root: Path) -> Row | None:
    if path.suffix != ".json":
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        predicted, measured = dict(data["predicted"]), dict(data["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    facts: dict[str, Any] = {"batch": data.get("batch_size"), "device": data.get("device")}
    plan = _plan_of(path.parent, asked.get("plan"), root)
    return Row(name, "run", facts=(_facts(plan) if plan else {}) | facts, predicted=predicted, measured=measured)


def _plan_of(here: Path, asked: str | None, root: Path) -> Plan | None:
    """The plan that a run obeyed: where its override says, seen from here or from a directory around the sweep."""
    named = asked or "plan.yaml"
    places = [here, Path.cwd(), *root.resolve().parents] if asked else [here]
    for place in places:
        if (place / named).is_file():
            return _cached_plan(place / named)
    return None


@lru_cache(maxsize=64)
def _cached_plan(path: Path) -> Plan | None:
    try:
        return read_plan(path)
    except UserError:
        return None


def _facts(plan: Plan) -> dict[str, Any]:
    d = plan.decisions
    return {
        "hardware": plan.hardware.name,
        "model": plan.model.name,
        "workload": plan.workload.name,
        "batch": d.batch,
        "policy": str(d.weights.policy),
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value
