"""`planner diff`: two plans side by side, as a table and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.planner.asked.verb_schema import DiffConfig
from penstock.planner.common.console import WIDTH, make_console, uncut
from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.common.output import check_apart, write_json
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.plan.planfile import read_plan
from penstock.planner.verbs.plan_diff import Difference, Part, PlanDiff, compare, document

TITLES = {Part.decided: "Decided", Part.predicted: "Predicted", Part.assumed: "Assumed"}
LONGEST = 16
"""Characters of a value that a table shows; JSON has all."""


def diff_verb(cfg: DiffConfig) -> None:
    """Compare and tell; the last line is one JSON document."""
    for key, plan in (("a", cfg.a), ("b", cfg.b)):
        check_apart({key: plan, "out": cfg.out})
    found = compare(read_plan(user_path(cfg.a), "a"), read_plan(user_path(cfg.b), "b"))
    result = {"a": cfg.a, "b": cfg.b, **document(found)}
    if cfg.out is not None:
        write_json(user_path(cfg.out), "out", result)
    _print(found, cfg, make_console())
    cfg.close(result)


def _print(found: PlanDiff, cfg: DiffConfig, console: Console) -> None:
    console.print(f"a: {cfg.a}\nb: {cfg.b}", style="dim", soft_wrap=True)
    for name, broken in (("a", found.broken_a), ("b", found.broken_b)):
        for rule in broken:
            console.print(f"{name} breaks a rule, so its prediction is as it was written: {rule}", style="bold red", soft_wrap=True)
    if not found.differences:
        console.print("The plans are the same.")
    for part, title in TITLES.items():
        rows = [d for d in found.differences if d.part is part]
        if rows:
            console.print()
            with uncut(console):
                console.print(_table(title, rows))


def _table(title: str, rows: Iterable[Difference]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim", width=WIDTH)
    for name in ("", "a", "b", "b / a"):
        table.add_column(name, justify="left" if not name else "right", overflow="fold")
    for row in rows:
        shown = row.name.removeprefix("predicted.")
        ratio = "" if row.ratio is None else f"{row.ratio:.4g}"
        table.add_row(shown, _text(row.name, row.a), _text(row.name, row.b), ratio)
    return table


def _text(name: str, value: Any) -> str:
    """A value as people read it: bytes and seconds by the name's ending."""
    leaf = name.rpartition(".")[2]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if leaf.endswith("bytes") or leaf.endswith("bytes_per_token"):
            return show_bytes(value)
        if leaf.endswith("_per_s"):
            return f"{value:.3g}"
        if leaf.endswith("_s") or leaf.endswith("_s_per_token") or "_stages." in name:
            return show_seconds(value)
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    text = "-" if value is None else json.dumps(value) if isinstance(value, list) else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
