"""Ranks with whole routed experts record what lies between these, their hops with it; each is a process with a card that is played."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.contract.given.links import Links
from penstock.planner.contract.plan.planfile import write_plan
from tests.cli import HANGS_S, ROOT
from tests.runtime.ranks.company import EVERY, dealt_plan
from tests.support import decisions, machine, save_tiny

THREE_ROWS = 2
"""Of the steps that are played."""
RESIDENT = {"cap": 0, "hwm": 3, "distance": 0, "batch": 3, "pages": 16}


def planned(where: Path, count: int, layers: int, **model: Any) -> tuple[Path, Path]:
    """A plan's file and its checkpoint."""
    checkpoint = save_tiny(where / "model", layers=layers, **model)
    found = machine(True, cpu_cores=count, cpu_threads=count, devices=tuple(range(count)), links=Links(word_hop_s=2e-5))
    assert found.gpu is not None
    card, each = replace(found, gpu=replace(found.gpu, layer_kernels_s=1e-5)), layers // count
    made = decisions(gpu=True, resident=(each, each, 1), experts=ExpertSlots(8, 24), **RESIDENT)
    write_plan(dealt_plan(checkpoint, made, count, card, batch=3, requests=3), where / "plan.yaml")
    return where / "plan.yaml", checkpoint


def played(plan: Path, checkpoint: Path, out: Path, **asked: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """What rank 0 says of all steps, and what it tells; ``asked`` in the environment."""
    command = [sys.executable, "-m", "tests.runtime.ranks.played_graphs", plan, checkpoint, out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S, check=False, env=os.environ | asked)
    assert done.returncode == 0, done.stderr[-3000:]
    kept = torch.load(out)
    return kept["said"], dict(kept["told"])


CASES: dict[str, tuple[int, int, dict[str, Any], list[int]]] = {
    "two ranks": (2, 6, {"model_type": "mixtral"}, [4, 4]),
    "three ranks, one layer without experts": (3, 6, {"model_type": "qwen3_moe", "mlp_only_layers": [1]}, [3, 2, 3]),
}
"""Ranks, layers, the model, and pieces of each rank's step."""


@pytest.mark.parametrize("case", CASES if EVERY else [*CASES][:1])
def test_ranks_record_what_lies_between_their_experts_or_none_of_them_does(case: str, tmp_path: Path) -> None:
    count, layers, model, pieces = CASES[case]
    plan, checkpoint = planned(tmp_path, count, layers, **model)
    said, told = played(plan, checkpoint, tmp_path / "recorded.pt")
    assert told["launched"] is None
    for one, own in zip((told, *told["others"]), pieces, strict=True):
        assert {"rows": 3, "refused": None, "steps": THREE_ROWS, "pieces": own}.items() <= one["graphs"].items()
    launched, told = played(plan, checkpoint, tmp_path / "launched.pt", FAILS=f"{count - 1}.0")
    for one in (told, *told["others"]):
        assert "operation not permitted" in one["graphs"]["refused"] and one["graphs"]["steps"] == 0
    assert len(said) > 6 * THREE_ROWS and all(map(torch.equal, said, launched))
