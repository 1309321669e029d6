"""`planner doctor`: the machine's findings as lines and JSON."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.text import Text

from penstock.planner.asked.verb_schema import DoctorConfig
from penstock.planner.common.console import make_console
from penstock.planner.common.output import write_json
from penstock.planner.common.user_folder import user_path
from penstock.planner.doctor.card_check import look
from penstock.planner.doctor.examination import document, examine
from penstock.planner.doctor.finding import Finding, Verdict

_MARKS = {Verdict.good: ("ok", "green"), Verdict.fair: ("!", "yellow"), Verdict.stops: ("x", "bold red"), Verdict.unknown: ("?", "dim")}
_NAME = 14
_INDENT = " " * (5 + _NAME)


def doctor_verb(cfg: DoctorConfig) -> int:
    """Look, tell, and return 1 where something stops a run, else 0; the last line is one JSON document."""
    findings = examine(user_path(cfg.path), look())
    result = {"path": cfg.path, **document(findings)}
    if cfg.out is not None:
        write_json(user_path(cfg.out), "out", result)
    console = make_console()
    for finding in findings:
        _tell(finding, console)
    console.print(_summary(findings), style="bold", soft_wrap=True)
    cfg.close(result)
    return 1 if result["stops"] else 0


def _tell(finding: Finding, console: Console) -> None:
    mark, style = _MARKS[finding.verdict]
    name = finding.name if len(finding.name) <= _NAME else finding.name[: _NAME - 1] + "…"
    lines = textwrap.wrap(finding.found, console.width - len(_INDENT), break_long_words=False) or [""]
    console.print(Text(f"{mark:<4}", style=style).append(f"{name:<{_NAME}} {lines[0]}", "default"), soft_wrap=True)
    for line in lines[1:]:
        console.print(_INDENT + line, soft_wrap=True)
    for line in textwrap.wrap(finding.change, console.width - len(_INDENT), break_long_words=False, break_on_hyphens=False):
        console.print(Text(_INDENT + line, style="dim"), soft_wrap=True)


def _summary(findings: tuple[Finding, ...]) -> str:
    stops, fair = (sum(f.verdict is verdict for f in findings) for verdict in (Verdict.stops, Verdict.fair))
    if stops:
        return f"{stops} of {len(findings)} stop a run (x), {fair} could be better (!)."
    return f"Nothing stops a run; {fair} of {len(findings)} could be better (!)."
