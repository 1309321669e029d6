"""What a verb writes takes the place of an older file, and of nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.output import check_apart, writable, write_at_once
from penstock.planner.contract.config.geometry import spec_from_geometry
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import read_plan, write_plan
from tests.cli import refusal
from tests.planner.test_planfile import LLAMA, plan_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(spec_from_geometry(LLAMA))


def filled(temporary: Path) -> None:
    temporary.write_text("new")


def test_a_pipe_is_refused_and_still_there(plan: Plan, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for attempt in (lambda: writable(pipe, "out"), lambda: write_at_once(pipe, "out", filled), lambda: write_plan(plan, pipe)):
        with pytest.raises(UserError, match=r"out=.*pipe.json: a device, pipe or socket, which a file would replace; name a file"):
            attempt()
    assert stat.S_ISFIFO(pipe.stat().st_mode) and os.listdir(tmp_path) == ["pipe.json"]


def test_a_device_is_refused_before_the_work() -> None:
    with pytest.raises(UserError, match="out=/dev/null: a device, pipe or socket, which a file would replace; name a file"):
        writable(Path("/dev/null"), "out")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "run.json").write_text("old")
    link = tmp_path / "run.json"
    link.symlink_to(Path("there", "run.json"))
    write_at_once(writable(link, "out"), "out", filled)
    assert link.is_symlink() and (tmp_path / "there" / "run.json").read_text() == "new"
    assert os.listdir(tmp_path / "there") == ["run.json"]


def test_a_name_that_no_disk_takes_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written \(File name too long\); choose another out="):
        writable(tmp_path / ("x" * 300), "out")


def test_two_keys_that_name_one_file_are_refused_links_followed(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("plan")
    (tmp_path / "other.yaml").symlink_to("plan.yaml")
    check_apart({"plan": tmp_path / "plan.yaml", "out": tmp_path / "out.json", "html": None, "trace": None})
    with pytest.raises(UserError, match=r"out=.*other.yaml: plan= names the same file; choose another out="):
        check_apart({"plan": tmp_path / "plan.yaml", "out": str(tmp_path / "other.yaml")})


@pytest.mark.parametrize(
    ("verb", "keys"),
    [
        ("explain", ["plan=p.json", "out=p.json"]),
        ("explain", ["plan=p.json", "out=e.json", "html=e.json"]),
        ("simulate", ["plan=p.json", "trace=p.json"]),
        ("simulate", ["plan=p.json", "trace=s.json", "out=./s.json"]),
        ("export", ["plan=p.json", "to=env", "out=p.json"]),
        ("diff", ["p.json", "p.json", "out=p.json"]),
        ("replay", ["routings=p.json", "out=p.json"]),
    ],
)
def test_no_verb_writes_over_what_it_reads(verb: str, keys: list[str], plan: Plan, tmp_path: Path) -> None:
    write_plan(plan, tmp_path / "p.json")
    assert "names the same file; choose another" in refusal("planner", verb, *keys, cwd=tmp_path)
    assert read_plan(tmp_path / "p.json").decisions == plan.decisions
