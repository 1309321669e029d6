"""Running a plan as `runtime run` does, in this process: importing torch again for every run takes seconds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.force import Force
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.contract.prices.memory_law import dram_use
from penstock.planner.solver.program import solve
from penstock.runtime.asked.run_schema import RunConfig
from penstock.runtime.tools.runtime_verbs import run_verb
from tests.support import machine, workload

PROMPTS = ["def main():", "import os", "class Shape(object):\n    def __init__(self, name, sides):\n        self.name"]


@dataclass(frozen=True)
class Desk:
    """A directory with a plan in it, and the runs of it."""

    plan: Path

    @property
    def out(self) -> Path:
        return self.plan.with_name("run.json")

    def run(self, **keys: Any) -> dict[str, Any]:
        """The report of ``runtime run plan=... key=value ...``."""
        run_verb(self.config(**keys))
        return json.loads(self.out.read_text(encoding="utf-8"))

    def config(self, **keys: Any) -> RunConfig:
        return RunConfig(**{"plan": str(self.plan), "out": str(self.out), **keys})

    def refusal(self, **keys: Any) -> str:
        """The one line that a run ends with, which leaves no thread and no file behind."""
        with leaves_nothing_behind(self.plan.parent), pytest.raises(UserError) as refused:
            run_verb(self.config(**keys))
        line = str(refused.value)
        assert line and "\n" not in line
        return line

    def edit(self, old: str, new: str) -> None:
        """Replace text in the plan's file."""
        text = self.plan.read_text(encoding="utf-8")
        assert old in text, f"{old!r} is not in the plan"
        self.plan.write_text(text.replace(old, new, 1), encoding="utf-8")


@contextmanager
def leaves_nothing_behind(directory: Path) -> Iterator[None]:
    """Inside, threads may come and files may be written, as long as they are gone at the end."""
    threads, files = set(threading.enumerate()), sorted(directory.rglob("*"))
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)  # the progress bar's own ends a moment after it was told to
        assert not thread.is_alive(), f"{thread} was left behind"
    assert sorted(directory.rglob("*")) == files


def solved(checkpoint: Path, keep_layers: int = 1, **work: Any) -> Plan:
    """The planner's own plan for ``checkpoint`` without a GPU, in as little DRAM as keeps ``keep_layers`` of its layers."""
    roomy, model, work_ = machine(), spec_from_checkpoint(checkpoint), workload(**work)
    least = solve(roomy, model, work_, Force(cap_layers=keep_layers))
    hardware = replace(roomy, dram_bytes=sum(dram_use(roomy, model, work_, least).values()))
    made = solve(hardware, model, work_)
    return Plan(hardware, model, work_, made, predict(hardware, model, work_, made))


def desk(directory: Path, plan: Plan) -> Desk:
    write_plan(plan, directory / "plan.yaml")
    return Desk(directory / "plan.yaml")
