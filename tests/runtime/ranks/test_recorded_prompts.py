"""Ranks that record the layers of their prompts, each a process with a card that is played: hops between layers stay launched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.given.links import Links
from tests.runtime.ranks import played_graphs
from tests.runtime.ranks.company import EVERY, dealt_plan
from tests.runtime.ranks.played_runs import run_played, said_as_the_whole
from tests.support import decisions, machine, save_tiny

PART = 8
LAUNCHED = 3 * (1 + 1 + 2)
"""Of a rank: its layers, times the parts of the prompts of 5, 9 and 13 tokens that have more than 4."""


def told(where: Path, **asked: str) -> dict[str, Any]:
    """What rank 0 tells of a run that says what the whole model says."""
    checkpoint = save_tiny(where / "model")
    found = machine(True, cpu_cores=2, cpu_threads=2, devices=(0, 1), links=Links(word_hop_s=2e-5))
    assert found.gpu is not None
    card = replace(found, gpu=replace(found.gpu, layer_kernels_s=1e-5, prompt_piece_s=1e-4))
    resident = decisions(gpu=True, batch=3, pages=16, resident=(3, 3, 1), cap=0, hwm=3, distance=0, embedding=Tier.vram)
    made = replace(resident, prefill_chunk_tokens=16, prefill_part_tokens=PART, recorded_prompt_tokens=PART)
    plan = dealt_plan(checkpoint, made, 2, card, batch=3, requests=3)
    done = run_played(played_graphs, plan, checkpoint, where, asked)
    return dict(said_as_the_whole(done, where, checkpoint)["told"])


def test_parts_of_prompts_are_launched_as_they_were_recorded(tmp_path: Path) -> None:
    found = told(tmp_path)
    for one in (found, *found["others"]):
        assert one["prompts"] == {"tokens": PART, "refused": None, "layers": LAUNCHED}


@pytest.mark.skipif(not EVERY, reason="make test-ranks runs it")
def test_a_rank_that_records_no_prompts_launches_its_own(tmp_path: Path) -> None:
    found = told(tmp_path, FAILS="1.0")
    assert found["prompts"] == {"tokens": PART, "refused": None, "layers": LAUNCHED}
    (other,) = found["others"]
    assert other["prompts"]["tokens"] == other["prompts"]["layers"] == 0
    assert other["prompts"]["refused"].startswith("CUDA error: operation not permitted")
