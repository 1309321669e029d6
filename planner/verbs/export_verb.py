"""`planner export`: a plan written for another engine, with what that engine cannot express."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.planner.asked.verb_schema import ExportConfig
from penstock.planner.common.console import make_console
from penstock.planner.common.output import check_apart, write_at_once
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.plan.plan_ranks import check_alone
from penstock.planner.contract.plan.planfile import check_plan, read_plan
from penstock.planner.export.exported import Losses, Request, cost
from penstock.planner.export.targets import find_target


def export_verb(cfg: ExportConfig) -> None:
    """Write the export and tell what is lost; the last line is one JSON document."""
    target = find_target(cfg.to)
    plan = read_plan(user_path(cfg.plan))
    check_plan(plan)
    check_alone(plan.ranks, cfg.plan, "`planner export`")
    request = Request(plan, os.path.basename(cfg.plan))
    made = target.export(request)
    out = user_path(cfg.out) if cfg.out is not None else Path(f"{user_path(cfg.plan).stem}.{target.ending}")
    check_apart({"plan": cfg.plan, "out": out})
    write_at_once(out, "out", lambda temporary: temporary.write_text(made.text, encoding="utf-8"))
    _tell(made.losses, plan.prediction.decode_tokens_per_s, target.name, out)
    cfg.close(_document(made.losses, cfg.plan, target.name, out, plan.prediction.decode_tokens_per_s))


def _tell(losses: Losses, own: float, target: str, out: Path) -> None:
    console = make_console()
    for lost in losses.lost:
        console.print(f"not expressed: {lost.decided}: {lost.instead}. {cost(lost, own)}", style="dim")
    if losses.cannot_run:
        console.print(f"{target} cannot run this plan as it is on this machine: {losses.cannot_run}", style="bold yellow")
    console.print(f"wrote {os.path.relpath(out)}", soft_wrap=True)


def _document(losses: Losses, plan: str, target: str, out: Path, own: float) -> dict[str, object]:
    return {
        "plan": plan,
        "to": target,
        "out": os.path.relpath(out),
        "decode_tokens_per_s": own,
        "together_tokens_per_s": losses.together_tokens_per_s,
        "cannot_run": losses.cannot_run or None,
        "lost": [
            {
                "decided": lost.decided,
                "instead": lost.instead,
                "decode_tokens_per_s": lost.tokens_per_s,
                "unpredicted": lost.unpredicted or None,
            }
            for lost in losses.lost
        ],
    }
