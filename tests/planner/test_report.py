"""`planner report`: one table of what a directory of sweeps holds."""

from __future__ import annotations

import csv
import json
import re
import xml.dom.minidom
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock.planner.common.command.sweep_folders import SWEEP_CONFIG, Point, write_point
from penstock.planner.common.errors import UserError
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.report.gather import SILENT, gather
from penstock.planner.report.report_table import as_rows, columns
from penstock.planner.report.scatter import Axis, Mark, legend, mark_at, pareto, scatter
from tests.cli import command, refusal
from tests.planner.small import GB, machine, model
from tests.planner.test_export import plan_of


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two plans, a point without one, one that was killed, and two runs of the second plan, one 10 % slower than predicted."""
    directory = tmp_path / "sweeps" / "0"
    plans = [plan_of(machine(vram, 64 * GB), model(16)) for vram in (GB, 2 * GB)]
    for number, plan in enumerate(plans):
        asked = (f"hardware.vram_bytes={plan.hardware.vram_bytes}", "model=small")
        write_point(directory / str(number), Point("planner solve", number, asked, 0, None))
        write_plan(plan, directory / str(number) / "plan.yaml")
    write_point(directory / "2", Point("planner solve", 2, ("hardware.vram_bytes=1", "model=small"), 2, "no plan fits: VRAM is short"))
    (directory / "3").mkdir()
    (directory / SWEEP_CONFIG).write_text("hydra: {}\n")
    runs = tmp_path / "sweeps" / "1"
    for number, slower in enumerate((1.0, 1.1)):
        write_point(runs / str(number), Point("runtime run", number, ("plan=sweeps/0/1/plan.yaml", f"seed={number}"), 0, None))
        predicted = asdict(plans[1].prediction)
        measured = {key: value for key, value in predicted.items() if not isinstance(value, dict)}
        measured["decode_tokens_per_s"] = predicted["decode_tokens_per_s"] / slower
        (runs / str(number) / "run.json").write_text(json.dumps({"predicted": predicted, "measured": measured, "batch_size": 1}))
    return directory.parent


def rows_of(directory: Path) -> list[dict[str, Any]]:
    gathered = gather(directory)
    return as_rows(gathered, columns(gathered))


def test_plans_runs_and_failures_are_rows_of_one_table(sweep: Path) -> None:
    rows = rows_of(sweep)
    assert [row["kind"] for row in rows] == ["plan", "plan", "failed", "failed", "run", "run"]
    assert [row["error"] for row in rows] == [None, None, "no plan fits: VRAM is short", SILENT, None, None]
    assert [row["hardware.vram_bytes"] for row in rows[:3]] == ["1000000000", "2000000000", "1"]
    assert [row["model"] for row in rows] == ["small", "small", None, None, "small", "small"]
    assert rows[4]["predicted_over_measured"] == pytest.approx(1.0) and rows[5]["predicted_over_measured"] == pytest.approx(1.1)


def test_the_report_is_written_as_csv_json_and_a_page_without_a_network(sweep: Path) -> None:
    result = command("planner", "report", "sweeps", cwd=sweep.parent)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert (document["plans"], document["runs"], document["failed"]) == (2, 2, 2)
    rows = json.loads((sweep / "report.json").read_text())["rows"]
    with open(sweep / "report.csv", newline="") as file:
        assert [row["path"] for row in csv.DictReader(file)] == [row["path"] for row in rows]
    page = (sweep / "report.html").read_text()
    assert not re.search(r"(?:src|href)=|url\(|@import|<script", page)
    plots = re.findall(r"<svg role=.*?</svg>", page, re.DOTALL)
    circles = [len(xml.dom.minidom.parseString(plot).getElementsByTagName("circle")) for plot in plots]
    assert circles == [4, 4, 2]
    assert "no plan fits: VRAM is short" in page


def test_a_second_report_does_not_take_the_first_for_a_foreign_file(sweep: Path) -> None:
    first, second = (json.loads(command("planner", "report", "sweeps", cwd=sweep.parent).stdout.splitlines()[-1]) for _ in range(2))
    assert first == second and first["left_out"] == []


def test_foreign_files_are_named_and_left_out(sweep: Path) -> None:
    (sweep / "0" / "1" / "notes.txt").write_text("mine")
    (sweep / "0" / "other.json").write_text("[1]")
    (sweep / "0" / "other.yaml").write_text("a: [")
    gathered = gather(sweep)
    assert set(gathered.left_out) == {"0/1/notes.txt", "0/other.json", "0/other.yaml"} and len(gathered.rows) == 6


def test_a_plan_that_someone_broke_is_a_row_that_says_so(sweep: Path) -> None:
    plan = sweep / "0" / "1" / "plan.yaml"
    plan.write_text(plan.read_text().replace("prefill_chunk_tokens:", "prefil_chunk_tokens:"))
    row = next(row for row in rows_of(sweep) if row["path"] == "0/1/plan.yaml")
    assert row["kind"] == "failed" and "did you mean prefill_chunk_tokens?" in row["error"]


def test_a_page_escapes_what_files_say(sweep: Path) -> None:
    write_point(sweep / "0" / "2", Point("planner solve", 2, ("model=<b>",), 2, "<script>alert(1)</script>"))
    assert command("planner", "report", "sweeps", cwd=sweep.parent).returncode == 0
    page = (sweep / "report.html").read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_a_directory_that_is_none_or_holds_nothing_is_one_line(tmp_path: Path) -> None:
    assert "dir=none" in refusal("planner", "report", "none", cwd=tmp_path)
    (tmp_path / "empty").mkdir()
    line = refusal("planner", "report", "empty", cwd=tmp_path)
    assert "holds no plan and no run" in line and "--multirun" in line
    (tmp_path / "empty" / "foreign.json").write_text("{}")
    with pytest.raises(UserError, match="holds no plan and no run"):
        gather(tmp_path / "empty")


def test_the_front_is_what_nothing_with_as_little_memory_beats() -> None:
    marks = [Mark(x, y, "", "") for x, y in ((1, 1), (2, 3), (2, 4), (3, 2), (4, 5), (5, 5))]
    assert [(m.x, m.y) for m in pareto(marks)] == [(1, 1), (2, 4), (4, 5)]


def test_an_axis_has_round_ticks_within_its_ends() -> None:
    for values in ((0.3, 1.7), (3.0, 3.0), (1e-3, 40.0), (6.0e9, 7.0e9)):
        axis = Axis.over(values, 0, 100)
        assert 2 <= len(axis.ticks) <= 8 and all(axis.low <= tick <= axis.high for tick in axis.ticks)
        assert all(f"{tick:.10e}"[0] in "12345678" and 0 <= axis(tick) <= 100 for tick in axis.ticks if tick)


def test_a_plot_of_nothing_says_so() -> None:
    assert scatter("empty", "x", "y", [], []) == ""


def test_no_two_of_forty_groups_look_alike() -> None:
    groups = [f"machine {i}" for i in range(40)]
    assert len({mark_at(0, 0, group, groups) for group in groups}) == 40
    assert all(text in legend(groups) for text in ("<circle", "<polygon", "machine 39"))
