"""The report as one HTML page, pictures and table in it: nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.planner.common.measures import GB
from penstock.planner.report.gather import Gathered, Row
from penstock.planner.report.report_table import Column, show
from penstock.planner.report.scatter import Mark, legend, scatter

_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.5 system-ui,sans-serif;margin:2rem}
h1{font-size:1.3rem;margin:0 0 .3rem} h2{font-size:1.05rem;margin:1.6rem 0 .4rem}
.plots{display:flex;flex-wrap:wrap;gap:1rem} .plots svg{width:460px;max-width:100%}
svg text{font:11px system-ui,sans-serif;fill:currentColor} svg text.name{font-size:13px;font-weight:600}
svg .grid{stroke:#8886;stroke-width:.6} svg .front{stroke:#888;stroke-width:1.4;stroke-dasharray:4 3;fill:none}
.scroll{overflow-x:auto} table{border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .45rem;text-align:left;border-bottom:1px solid #8884} td{white-space:nowrap}
th{position:sticky;top:0;background:Canvas;vertical-align:bottom} td.error{white-space:normal;min-width:44rem;color:#c33}
.legend span{margin-right:1.2rem;white-space:nowrap} .legend svg{width:1em;height:1em;margin-right:.3em;vertical-align:-.1em}
"""
_SPEED = "tokens/s"


def page(gathered: Gathered, shown: Sequence[Column]) -> str:
    """The whole document."""
    rows = gathered.rows
    counts = {kind: sum(row.kind == kind for row in rows) for kind in ("plan", "run", "failed")}
    groups = list(dict.fromkeys(_group(row) for row in rows if row.best("decode_tokens_per_s")))
    told = f"{counts['plan']} plans, {counts['run']} runs, {counts['failed']} points that failed"
    plots = [
        scatter("tokens/s against VRAM", "VRAM, GB", _SPEED, _marks(rows, "vram_bytes"), groups),
        scatter("tokens/s against DRAM", "DRAM, GB", _SPEED, _marks(rows, "dram_bytes"), groups),
        scatter("predicted against measured", f"measured {_SPEED}", f"predicted {_SPEED}", _pairs(rows), groups, diagonal=True),
    ]
    left_out = f"<p>Left out, being neither plan nor run: {escape(', '.join(gathered.left_out))}.</p>" if gathered.left_out else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(str(gathered.directory))}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(str(gathered.directory))}</h1><p>{told}. As measured where it ran, else as predicted; a dashed line joins, for one "
        "machine and model, the points that nothing with as little memory beats.</p>\n"
        f'<div class="plots">{"".join(plots)}</div>\n{legend(groups)}\n<h2>All points</h2>\n{_table(rows, shown)}\n{left_out}'
        "</body></html>\n"
    )


def _group(row: Row) -> str:
    known = [str(row.facts[name]) for name in ("hardware", "model") if row.facts.get(name)]
    return ", ".join(known) or "unknown"


def _label(row: Row) -> str:
    asked = "  ".join(f"{key}={value}" for key, value in row.asked.items())
    return f"{row.path}: {row.best('decode_tokens_per_s'):.4g} tokens/s  {asked}"


def _marks(rows: Sequence[Row], memory: str) -> list[Mark]:
    """Rows with both figures; a tier of which nothing is used has none."""
    marks = []
    for row in rows:
        nbytes, speed = row.best(memory), row.best("decode_tokens_per_s")
        if nbytes and speed:
            marks.append(Mark(nbytes / GB, speed, _label(row), _group(row)))
    return marks


def _pairs(rows: Sequence[Row]) -> list[Mark]:
    pairs = ((row, row.measured.get("decode_tokens_per_s"), row.predicted.get("decode_tokens_per_s")) for row in rows)
    return [Mark(measured, predicted, _label(row), _group(row)) for row, measured, predicted in pairs if measured and predicted]


def _table(rows: Sequence[Row], shown: Sequence[Column]) -> str:
    head = "".join(f"<th>{escape(column.name.replace('_', ' '))}</th>" for column in shown)
    body = "".join(f"<tr>{''.join(_cell(column, row) for column in shown)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'


def _cell(column: Column, row: Row) -> str:
    text = escape(show(column.name, column.value(row)))
    return f'<td class="error">{text}</td>' if column.name == "error" else f"<td>{text}</td>"
