"""`planner report`: plans and runs of a directory of sweeps in one table, as CSV, JSON and a page."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, TextColumn
from rich.table import Table

from penstock.planner.asked.verb_schema import ReportConfig
from penstock.planner.common.bars import make_bar
from penstock.planner.common.console import make_console
from penstock.planner.common.output import write_at_once
from penstock.planner.common.user_folder import user_path
from penstock.planner.report.gather import Gathered, gather
from penstock.planner.report.report_html import page
from penstock.planner.report.report_table import as_csv, as_rows, columns, ratio, show

ENDINGS = (".csv", ".json", ".html")


def report_verb(cfg: ReportConfig) -> None:
    """Gather, write the three files and show the table; the last line is one JSON document."""
    directory = user_path(cfg.dir)
    stem = user_path(cfg.out) if cfg.out is not None else directory / "report"
    with make_bar(TextColumn("gathering"), BarColumn()) as bar:
        bar.add_task("", total=None)
        gathered = gather(directory, frozenset(stem.name + ending for ending in ENDINGS))
    shown = columns(gathered)
    document = {"directory": str(directory), "rows": as_rows(gathered, shown), "left_out": list(gathered.left_out)}
    texts: dict[str, Callable[[], str]] = {
        ".csv": lambda: as_csv(gathered, shown),
        ".json": lambda: json.dumps(document, indent=1, ensure_ascii=False) + "\n",
        ".html": lambda: page(gathered, shown),
    }
    files = []
    for ending in ENDINGS:
        path = stem.with_name(stem.name + ending)
        write_at_once(path, "out", partial(_write, text=texts[ending]()))
        files.append(os.path.relpath(path))
    _tell(gathered, files)
    kinds = [row.kind for row in gathered.rows]
    counts = {name: kinds.count(kind) for name, kind in (("plans", "plan"), ("runs", "run"), ("failed", "failed"))}
    cfg.close({"dir": str(directory), **counts, "files": files, "left_out": list(gathered.left_out)})


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _tell(gathered: Gathered, files: list[str]) -> None:
    console = make_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    swept = gathered.swept
    asks = " ".join(key.rpartition(".")[2] for key in swept) or "plan"
    for name in ("point", asks, "predicted tokens/s", "measured", "ratio", "VRAM", "DRAM"):
        table.add_column(name, justify="left" if name in ("point", asks) else "right", overflow="fold")
    for row in gathered.rows:
        asked = " ".join(show(key, row.asked.get(key)) or "-" for key in swept)
        where = os.path.dirname(row.path) if os.path.basename(row.path) in ("plan.yaml", "run.json") else row.path
        over = ratio(row)
        if row.error:
            table.add_row(where, asked, "failed", style="dim")
            continue
        table.add_row(
            where, asked or " ".join(str(row.facts[k]) for k in ("hardware", "model") if k in row.facts),
            show("decode_tokens_per_s", row.predicted.get("decode_tokens_per_s")),
            show("decode_tokens_per_s", row.measured.get("decode_tokens_per_s")),
            f"{over:.3f}" if over else "",
            show("vram_bytes", row.best("vram_bytes") or None), show("dram_bytes", row.best("dram_bytes")),
        )  # fmt: skip
    console.print(table)
    for row in gathered.rows:
        if row.error:
            console.print(f"{row.path}: {row.error}", style="yellow", soft_wrap=True)
    if gathered.left_out:
        console.print(f"left out, being neither plan nor run: {', '.join(gathered.left_out)}", style="dim", soft_wrap=True)
    console.print(f"wrote {', '.join(files)}", soft_wrap=True)
