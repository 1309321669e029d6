"""The programs as processes: the planner is asked for a plan as a user asks it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from omegaconf import OmegaConf

import penstock
from penstock.planner.common.command.wsm import PREFIX
from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan

ASKED = "asked"
"""The presets that a configuration is handed over as."""


class NoPlan(UserError):
    """`planner solve` found none; the message is its reason without the remedy, which ``whole`` has for whoever typed the command."""

    def __init__(self, whole: str):
        super().__init__(whole.partition("; ")[0])
        self.whole = whole


def solve(cfg: SolveConfig) -> Plan:
    """The plan that `planner solve` writes for ``cfg``. NoPlan for whatever keeps it from that."""
    with tempfile.TemporaryDirectory(prefix="penstock-solve-") as scratch:
        for group in ("hardware", "model", "workload"):
            preset = Path(scratch, group, f"{ASKED}.yaml")
            preset.parent.mkdir()
            preset.write_text(OmegaConf.to_yaml(OmegaConf.structured(getattr(cfg, group))), encoding="utf-8")
        out = Path(scratch, "plan.yaml")
        presets = [f"{group}={ASKED}" for group in ("hardware", "model", "workload")]
        force = [f"force.{key}={value}" for key, value in vars(cfg.force).items() if value is not None]
        drafts = [f"speculate={cfg.speculate}", *([] if cfg.draft is None else [f"draft={cfg.draft}"])]
        asked = [f"calibration={cfg.calibration}", f"ranks={cfg.ranks or 1}", f"out={out}"]
        words = ["--config-dir", scratch, *presets, *force, *drafts, *asked]
        try:
            planner("solve", *words)
        except UserError as error:
            raise NoPlan(str(error)) from error
        return read_plan(out)


def planner(verb: str, *words: str) -> None:
    """Run `planner VERB`. UserError for whatever ends it."""
    done = subprocess.run(program("planner", verb, *words), env=environment(), capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"planner {verb} ended with status {done.returncode}"]
        raise UserError(said[-1].removeprefix("planner: "))


def program(name: str, *words: str) -> list[str]:
    """The command of one of the two programs, of this package and by this interpreter."""
    code = f"import sys; sys.argv[0] = {name!r}; from penstock.{name}.cli import main; main()"
    return [sys.executable, "-c", code, *words]


def environment() -> dict[str, str]:
    """This process's own, without WSM's variables: they would change each mode's plan into the same one."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    here = str(Path(penstock.__file__).resolve().parent.parent)
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [here, kept.get("PYTHONPATH")]))}
