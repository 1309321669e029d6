"""`planner explain` from the outside: what it tells, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli import command, refusal

SOLVE = ("solve", "hardware=rtx5080", "model=llama8b")
EXPLAINABLE = ("hardware=rtx5080", "model=llama8b")


def test_explain_of_a_plan_ends_with_json_and_writes_what_it_is_asked_for(tmp_path: Path) -> None:
    command("planner", *SOLVE, cwd=tmp_path)
    result = command("planner", "explain", "plan=plan.yaml", "out=why.json", "html=why.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and "\x1b" not in result.stdout
    *told, last = result.stdout.splitlines()
    found = json.loads(last)
    assert found["feasible"] and found["plan"] == "plan.yaml" and found == json.loads((tmp_path / "why.json").read_text())
    assert (tmp_path / "why.html").read_text().startswith("<!doctype html>") and "What to buy next" in result.stdout
    assert max(map(len, told)) <= 80
    asked = command("planner", "explain", *EXPLAINABLE, cwd=tmp_path)
    assert json.loads(asked.stdout.splitlines()[-1]) == found | {"plan": None}, "the same question, the same answer"


def test_explain_of_what_does_not_fit_says_what_is_short_and_what_would_fit(tmp_path: Path) -> None:
    result = command("planner", "explain", *EXPLAINABLE, "hardware.vram_bytes=1GiB", "html=why.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert not found["feasible"] and found["shortages"][0]["together_bytes"] > 0
    assert "No plan fits." in (tmp_path / "why.html").read_text() and "What would fit" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan=plan.yaml", "hardware=t4"), ["hardware= with plan=", "leave one of them out"]),
        (("plan=plan.yaml", "workload.batch=2"), ["workload.batch= with plan="]),
        (("plan=plan.yaml", "force.cap_layers=2"), ["force.cap_layers= with plan="]),
        (("plan=plan.yaml", "calibration=off"), ["calibration= with plan="]),
        (("plan=plan.yaml",), ["plan=plan.yaml: no such file"]),
        (("hardware=t4",), ["model is required", "or set plan="]),
        (("model=llama8b",), ["hardware is required", "rtx5080"]),
        ((*EXPLAINABLE, "step=0"), ["step=0", "above 0 and below 1"]),
        ((*EXPLAINABLE, "html=/proc/why.html"), ["html=/proc/why.html: /proc is not a directory that can be written to"]),
        ((*EXPLAINABLE, "force.cap_layers=900"), ["force.cap_layers=900"]),
    ],
)
def test_explain_refuses_in_one_line_what_is_no_question(arguments: tuple[str, ...], words: list[str], tmp_path: Path) -> None:
    line = refusal("planner", "explain", *arguments, cwd=tmp_path)
    for word in words:
        assert word in line


def test_a_plan_is_explained_without_the_local_profile_and_the_seeds_variables(tmp_path: Path, clean_environment: Path) -> None:
    command("planner", *SOLVE, cwd=tmp_path)
    (clean_environment / "hardware").mkdir()
    (clean_environment / "hardware" / "local.yaml").write_text("name: local\nvram_byte: 3\n")
    result = command("planner", "explain", "plan=plan.yaml", cwd=tmp_path, WSM_CPU_CACHE_CAP_LAYERS="12")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["hardware"] == "rtx5080" and "WSM" not in result.stdout


def test_each_point_of_a_sweep_leaves_a_page_of_its_own(tmp_path: Path) -> None:
    small = ("hardware=cpu", "model=demo")
    result = command("planner", "explain", *small, "workload.batch=1,2", "--multirun", "html=why.html", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.html")) == ["sweeps/0/0/why.html", "sweeps/0/1/why.html"]
