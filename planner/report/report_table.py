"""The rows of a report as columns: the same for the terminal, CSV, JSON and the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.planner.common.measures import show_bytes, show_seconds
from penstock.planner.report.gather import Gathered, Row

PREDICTED = (
    "decode_tokens_per_s", "decode_s_per_token", "ttft_s", "load_s", "vram_bytes", "dram_bytes", "ssd_bytes_per_token",
    "h2d_bytes_per_token", "bottleneck_decode",
)  # fmt: skip
"""Figures that are predicted and measured."""
FACTS = ("hardware", "model", "workload", "batch", "policy", "device")


@dataclass(frozen=True)
class Column:
    """One column. Its name carries the unit of its values."""

    name: str
    value: Callable[[Row], Any]


def columns(gathered: Gathered) -> list[Column]:
    """Those in which any row has something, what was swept right after the path."""
    every = [Column("path", lambda row: row.path), Column("kind", lambda row: row.kind)]
    every += [Column(key, partial(_swept, key=key)) for key in gathered.swept]
    every += [Column(name, partial(_one, of="facts", name=name)) for name in FACTS if name not in gathered.swept]
    every += [Column(f"{of}_{name}", partial(_one, of=of, name=name)) for of in ("predicted", "measured") for name in PREDICTED]
    every += [Column("predicted_over_measured", ratio), Column("error", lambda row: row.error or None)]
    return [column for column in every if any(column.value(row) is not None for row in gathered.rows)]


def _swept(row: Row, key: str) -> Any:
    return row.asked.get(key, row.facts.get(key))


def _one(row: Row, of: str, name: str) -> Any:
    return getattr(row, of).get(name)


def ratio(row: Row) -> float | None:
    """Predicted over measured tokens/s."""
    predicted, measured = row.predicted.get("decode_tokens_per_s"), row.measured.get("decode_tokens_per_s")
    return predicted / measured if predicted and measured else None


def as_csv(gathered: Gathered, shown: Sequence[Column]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in shown])
    writer.writerows([column.value(row) for column in shown] for row in gathered.rows)
    return text.getvalue()


def as_rows(gathered: Gathered, shown: Sequence[Column]) -> list[dict[str, Any]]:
    """Row by row, column name -> value; what a row lacks is null."""
    return [{column.name: column.value(row) for column in shown} for row in gathered.rows]


def show(name: str, value: Any) -> str:
    """``value`` of the column ``name`` for a person."""
    if value is None:
        return ""
    if name.endswith("_bytes") and isinstance(value, str) and value.isdigit():
        return show_bytes(int(value)).replace(" ", "")
    if isinstance(value, float | int) and not isinstance(value, bool):
        if name.endswith(("_bytes", "_bytes_per_token")):
            return show_bytes(value)
        if name.endswith(("_s", "_s_per_token")) and not name.endswith("tokens_per_s"):
            return show_seconds(value)
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    return str(value)
