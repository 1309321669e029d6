"""`planner solve`: from the configuration to a plan file, printed on the way."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from penstock.planner.common.closing import Closing
from penstock.planner.common.console import make_console
from penstock.planner.common.errors import UserError
from penstock.planner.common.output import writable, write_at_once
from penstock.planner.common.user_folder import user_path
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.render.plan_text import print_plan
from penstock.planner.render.summary import summary
from penstock.planner.solver.planning import make_plan


def solve_plan(cfg: SolveConfig) -> None:
    """Write the plan to ``cfg.out`` and print it; the last line is one JSON document. An older file survives: a failure where it is, a plan
    that is another one under another name."""
    writable(user_path(cfg.out), "out")
    keep_plan(make_plan(cfg), cfg.out, cfg)


def keep_plan(plan: Plan, name: str, closing: Closing) -> None:
    """Write ``plan`` to the file ``name``, print it, and end as a verb does."""
    out = user_path(name)
    older = _text(out)
    aside = None if older is None else _copied_aside(out, older)
    write_plan(plan, out)
    if aside is not None and _text(out) == older:
        aside.unlink()
        aside = None
    console = make_console()
    print_plan(plan, console)
    if aside is not None:
        console.print(f"\n{os.path.relpath(out)} held another plan: it is {os.path.relpath(aside)} now", soft_wrap=True)
    name_here, verb = os.path.relpath(out), "serve" if plan.workload.clients else "run"
    console.print(f"\nwrote {name_here}; edit it if you know better, then: runtime {verb} plan={name_here}", soft_wrap=True)
    closing.close(summary(plan, name) | ({} if aside is None else {"older": str(aside)}))


def _text(path: Path) -> bytes | None:
    """What a file holds; None for what is no regular file."""
    try:
        return path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise UserError(f"out={path}: it is there and cannot be read ({error.strerror}); choose another out=") from error


def _copied_aside(path: Path, content: bytes) -> Path:
    """A file of ``content`` beside ``path``: NAME.1.ENDING, or with the next number that is free."""
    aside = next(p for n in count(1) if not (p := path.with_name(f"{path.stem}.{n}{path.suffix}")).exists())
    write_at_once(aside, "out", lambda temporary: temporary.write_bytes(content))
    return aside
