"""A plan for more cards than a machine has: one line, or, with replan=true, solved again for those that are there."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.planner.asked.verb_schema import ReplanConfig
from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from penstock.planner.solver.ranks_choice import answer_dealt
from penstock.planner.solver.terms.problem import Question
from penstock.planner.verbs.replan_verb import replan_verb
from penstock.runtime.company import cards_here, starting
from penstock.runtime.company.cards_here import cards_missing, check_cards
from penstock.runtime.company.company import Company, Seat
from penstock.runtime.memory.groundwork import Groundwork
from tests.planner.small import GB, machine, model, work


@pytest.fixture(scope="module")
def of_four() -> Plan:
    return answer_dealt(Question(machine(2 * GB, devices=(0, 1, 2, 3)), model(), work(), ranks=4))


def files(folder: Path, count: int) -> Path:
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(count))):
        (folder / name).touch()
    return folder


def test_cards_that_are_not_here_are_counted_without_torch(of_four, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cards_missing(of_four, devices=tmp_path) is None, "nobody knows"
    assert cards_missing(of_four, devices=files(tmp_path, 2)) == ((0, 1, 2, 3), 2)
    assert cards_missing(of_four, devices=files(tmp_path, 4)) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,-1,0")
    assert cards_missing(of_four, devices=tmp_path) == ((0, 1, 2, 3), 2)
    on_two = replace(of_four, hardware=replace(of_four.hardware, hosts=2, devices=(4, 5)))
    assert cards_missing(on_two, devices=tmp_path) == ((4, 5), 2)
    assert cards_missing(on_two, launched=True, devices=tmp_path) is None, "a launcher numbers them itself"
    monkeypatch.setattr(cards_here, "cards_here", lambda devices: 2)
    with pytest.raises(
        UserError, match=r"for GPUs 0, 1, 2, 3, and this machine has 2: solve again with hardware\.devices=\[0,1\], or add replan"
    ):
        check_cards(of_four)


def test_a_rank_that_sees_its_own_card_alone_does_not_look_for_the_others(of_four, monkeypatch):
    monkeypatch.setattr(cards_here, "cards_here", lambda devices: 1)
    with pytest.raises(UserError, match="this machine has 1"):
        Groundwork.of(of_four)
    Groundwork.of(of_four, company=Company(Seat(1, 4), None))


def test_a_plan_is_solved_again_for_the_cards_that_are_here(of_four, tmp_path, capsys):
    write_plan(of_four, tmp_path / "plan.yaml")
    asked = ReplanConfig(plan=str(tmp_path / "plan.yaml"), devices=[0, 1], out=str(tmp_path / "two.yaml"))
    replan_verb(asked)
    again = read_plan(tmp_path / "two.yaml")
    assert (again.ranks.count, again.hardware.devices, again.workload) == (2, (0, 1), of_four.workload)
    assert again.notes[-1] == "solved again for GPUs 0, 1: 2 ranks, and 4 ranks before"
    assert again.notes[-1] in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match=r"devices=\[0, 0\]: must be numbers of GPUs"):
        replan_verb(replace(asked, devices=[0, 0]))


def test_more_cards_than_ranks_start_no_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four cards of a machine a plan may use two."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(starting, "_watch", lambda listening, commands: started.extend(json.loads(each)["env"] for each in commands))
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")})
    made = starting.start(2, (2, 0, 1, 3))
    made.leave()  # nobody listens: its heart would end this process
    assert made.seat.count == 2
    assert [(each["RANK"], each["WORLD_SIZE"], each["CUDA_VISIBLE_DEVICES"]) for each in started] == [("1", "2", "0")]
