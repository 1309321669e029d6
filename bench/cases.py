"""The table of a benchmark: its cases one after the other, a line for each row as it is made, all of them in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table. ``ratio`` is result over limit; ``predicted`` is predicted over measured."""

    case: str
    what: str
    result: float
    limit: float
    unit: str
    ratio: float
    target: str
    predicted: float | None
    vram_gb: float
    dram_gb: float
    spread: str = ""
    """Of the limit's measurements, where it is a link's."""


Case = Callable[[], Iterator[Row]]
"""Runs one case and gives its rows as they are made."""
HEADER = (
    f"{'case':36} {'what':56} {'result':>9} {'limit':>9} {'':5} {'ratio':>6} {'target':8} {'pred/meas':>9} {'VRAM':>6} {'DRAM':>6}"
    "  limit from-to"
)


def line(row: Row) -> str:
    """``row`` below ``HEADER``."""
    predicted = f"{row.predicted:9.3f}" if row.predicted else " " * 9
    figures = f"{row.result:9.4g} {row.limit:9.4g} {row.unit:5} {row.ratio:6.3f} {row.target:8} {predicted}"
    return f"{row.case:36} {row.what:56} {figures} {row.vram_gb:6.2f} {row.dram_gb:6.2f}  {row.spread}"


def chosen(names: str, known: Mapping[str, Case]) -> dict[str, Case]:
    """The cases of a comma list. SystemExit for one that is not ``known``."""
    for name in names.split(","):
        if name not in known:
            raise SystemExit(f"cases={name}: choose from {', '.join(known)}")
    return {name: known[name] for name in names.split(",")}


def run_cases(cases: Mapping[str, Case], where: Mapping[str, Any], out: Path | None) -> None:
    """Print the rows of ``cases``, and keep them with the machine ``where`` in the JSON file ``out``."""
    print(json.dumps(where), flush=True)
    print(HEADER, flush=True)
    rows: list[Row] = []
    for case in cases.values():
        for row in case():
            rows.append(row)
            print(line(row), flush=True)
            if out is not None:
                out.write_text(json.dumps({"machine": where, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
