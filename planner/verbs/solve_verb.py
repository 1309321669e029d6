"""`planner solve`: from the configuration to a plan file, printed on the way."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.planner.common.console import make_console
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.render.plan_text import print_plan
from penstock.planner.render.summary import summary
from penstock.planner.solver.planning import make_plan


def solve_plan(cfg: SolveConfig) -> None:
    """Write the plan to ``cfg.out`` and print it; the last line is one JSON document. An older file survives a failure."""
    plan = make_plan(cfg)
    write_plan(plan, Path(cfg.out))
    console = make_console()
    print_plan(plan, console)
    console.print(
        f"\nwrote {os.path.relpath(cfg.out)}; edit it if you know better, then: runtime run plan={os.path.relpath(cfg.out)}", soft_wrap=True
    )
    cfg.close(summary(plan, cfg.out))
