"""Ranks that record their steps, each a process with a card that is played, while the CPU computes units of some of them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.contract.decided.host_units import HostUnits
from penstock.planner.contract.given.links import Links
from penstock.planner.contract.plan.schedules import ALONE, OWN
from tests.runtime.ranks import played_graphs
from tests.runtime.ranks.company import EVERY, dealt_plan
from tests.runtime.ranks.played_runs import run_played, said_as_the_whole
from tests.runtime.ranks.test_handed_steps import RATES
from tests.support import decisions, machine, save_tiny

ROWS = 3
FFN_BYTES = 3 * 64 * 160 * 2
DECODED = 12
"""Of the steps that are played, those of tokens alone."""
TWO = {"resident": (1, 0, 1), "cap": 3, "hwm": 6, "distance": 3}
THREE = {"resident": (0, 0, 0), "cap": 2, "hwm": 6, "distance": 2, "head_blocks": 2, "slots": 3, "vram_distance": 1}
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "rank 1 has none": ([2, 0], TWO),
    "two of each": ([2, 2], TWO),
    "rank 0 has none": ([0, 1, 1], THREE),
}
"""The CPU's units of each rank, and what all decide."""


def led(case: str, where: Path, **asked: str) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """What became of a run -> its checkpoint, and how the process of rank 0 ended."""
    units, decided = CASES[case]
    count, checkpoint = len(units), save_tiny(where / "model")
    found = machine(True, cpu_cores=count, cpu_threads=count, devices=tuple(range(count)), host=RATES, links=Links(word_hop_s=2e-5))
    assert found.gpu is not None
    card = replace(found, gpu=replace(found.gpu, layer_kernels_s=1e-5))
    plan = dealt_plan(checkpoint, decisions(gpu=True, batch=3, pages=16, **decided), count, card, batch=3, requests=3)
    first, *others = (
        replace(one, weights=replace(one.weights, host=HostUnits(own, ROWS) if own else HostUnits()))
        for own, one in zip(units, plan.ranks.decided(plan.decisions), strict=True)
    )
    plan = replace(plan, decisions=first, ranks=replace(plan.ranks, others=tuple(others)))
    assert [len(p.placement.host_units) for p in plan.each_rank] == units
    return checkpoint, run_played(played_graphs, plan, checkpoint, where, asked)


def told(case: str, where: Path, **asked: str) -> dict[str, Any]:
    """What rank 0 tells of a run that says what the whole model says."""
    checkpoint, done = led(case, where, **asked)
    return dict(said_as_the_whole(done, where, checkpoint)["told"])


def computed(found: dict[str, Any]) -> list[int]:
    """Bytes of weights that the CPU multiplied by for each rank."""
    others = [one["stages"]["decode"].get("cpu", {"bytes": 0})["bytes"] for one in found["others"]]
    return [found["stages"].get("cpu", (0, 0.0))[0], *others]


@pytest.mark.parametrize("case", CASES if EVERY else [*CASES][:1])
def test_recorded_ranks_have_the_cpu_compute_units_and_follow_one_schedule(case: str, tmp_path: Path) -> None:
    """The played CPU is slower than planned: rank 0 moves to the other schedule, and all go on by that one."""
    found, (units, _) = told(case, tmp_path), CASES[case]
    graphs = found["graphs"]
    own, alone = (graphs["schedules"]["steps"].get(name, 0) for name in (OWN, ALONE))
    assert graphs["refused"] is None and graphs["steps"] == own + alone == DECODED
    assert own and alone and found["handed"] is None and found["launched"] is None
    for other in found["others"]:
        assert other["graphs"] == {"rows": 3, "refused": None, "steps": DECODED} and other["handed"] is None
    assert computed(found) == [(own + 1) * one * FFN_BYTES for one in units], "with the step that holds the CPU to the card"


FAULTS: dict[str, tuple[dict[str, str], str | None, int, int]] = {
    "a rank records nothing": ({"FAILS": "1.0"}, "rank 1: CUDA error", 0, DECODED),
    "rank 0 records nothing": ({"FAILS": "0.0"}, "CUDA error", 0, DECODED),
    "a rank does not record the other schedule": ({"FAILS": "1.1"}, None, DECODED, DECODED),
    "a rank's units are not the card's": ({"DISAGREES": "1"}, None, DECODED, 1),
}
"""What is asked, why all launch kernel by kernel, steps that were recorded, and those of which the CPU computed units."""


@pytest.mark.skipif(not EVERY, reason="make test-ranks runs it")
@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_rank_cannot_do_no_rank_does(fault: str, tmp_path: Path) -> None:
    """Where steps are not recorded, the interpreter hands the units over."""
    asked, why, recorded, beside = FAULTS[fault]
    found = told("two of each", tmp_path, **asked)
    for one in (found, *found["others"]):
        assert one["graphs"]["steps"] == recorded
        assert (one["handed"] is None) is bool(recorded)
        if why is not None:
            assert "CUDA error: operation not permitted" in one["graphs"]["refused"]
            assert one["handed"] == {"steps": DECODED, "refused": None}
    if why is not None:
        assert found["launched"].startswith(f"a decode step is launched kernel by kernel, not recorded: {why}")
    else:
        assert found["launched"] is None
    assert computed(found) == [beside * 2 * FFN_BYTES] * 2


ENDS = {
    "a rank is killed": ({"DIES": "1.8"}, "was killed by SIGKILL; all ranks have ended"),
    "Ctrl-C in the middle of a step": ({"STOPS": "0.8"}, "KeyboardInterrupt"),
}


@pytest.mark.parametrize("end", ENDS if EVERY else [*ENDS][:1])
def test_ranks_end_while_threads_look_for_words_that_will_not_come(end: str, tmp_path: Path) -> None:
    asked, said = ENDS[end]
    _, done = led("two of each", tmp_path, **asked)
    assert done.returncode != 0 and said in done.stderr
