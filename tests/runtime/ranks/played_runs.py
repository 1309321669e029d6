"""Runs of ranks whose cards are played, as processes of their own, and what they say beside the whole model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.contract.rules.broken import broken_rules
from tests.cli import HANGS_S, ROOT
from tests.runtime.ranks.played_cards import steps
from tests.runtime.steppers import unstreamed


def run_played(by: ModuleType, plan: Plan, checkpoint: Path, where: Path, asked: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """How the process of rank 0 ended, that of the program ``by`` with ``asked`` in its environment. What it said lies in ``where``."""
    assert [rule for p in plan.each_rank for rule in broken_rules(p.hardware, p.model, p.workload, p.decisions)] == []
    write_plan(plan, where / "plan.yaml")
    command = [sys.executable, "-m", by.__name__, where / "plan.yaml", checkpoint, where / "said.pt"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S, check=False, env=os.environ | asked)


def said_as_the_whole(
    done: subprocess.CompletedProcess[str], where: Path, decoded: Path, dtype: torch.dtype = torch.bfloat16, close: float = 0.02
) -> dict[str, Any]:
    """What rank 0 told of such a run, which ended well. Its logits are those that transformers gives of ``decoded``, but for ``close`` of
    the largest one."""
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(where / "said.pt")
    whole = unstreamed(AutoModelForCausalLM.from_pretrained(decoded, dtype=dtype).eval())
    for step, said in zip(steps(whole.pool.pages), found["said"], strict=True):
        want = whole.run(step).float()
        assert torch.allclose(said.float(), want, atol=close * want.abs().max().item(), rtol=0)
    return dict(found)
