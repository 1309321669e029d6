"""A machine's own calibration from the outside: `planner solve` and `explain` go by it, and say so."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.cli import command, refusal

SOLVE = ("solve", "hardware=rtx5080", "model=llama8b")

CALIBRATED = """\
penstock_calibration: 1
machine: {hardware: rtx5080, gpu: NVIDIA GeForce RTX 5080, cpu_cores: 16}
runs:
- {when: 2026-11-21 10:00, model: llama8b, geometry: 0, drive: a drive, h2d_gbps: 28.15}
"""


def calibrated(directory: Path, text: str = CALIBRATED) -> dict[str, str]:
    """The environment of a machine with this calibration for rtx5080."""
    path = directory / "config" / "calibrations" / "rtx5080.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("geometry: 0", "geometry: '0'"))
    return {"PENSTOCK_CONFIG_DIR": str(directory / "config")}


def test_solve_goes_by_what_runs_found_and_says_so_unless_told_not_to(tmp_path: Path) -> None:
    env = calibrated(tmp_path)
    own, off = (command("planner", *SOLVE[:-1], "model=llama70b", *more, cwd=tmp_path, **env) for more in ((), ("calibration=off",)))
    assert own.returncode == off.returncode == 0, own.stderr + off.stderr
    said, without = (json.loads(result.stdout.splitlines()[-1]) for result in (own, off))
    assert any("calibrated by 1 run" in note and "h2d 0.50" in note for note in said["notes"])
    assert not any("calibrated" in note for note in without["notes"])
    assert said["predicted"]["decode_s_per_token"] > 1.1 * without["predicted"]["decode_s_per_token"]


def test_explain_is_of_the_machine_as_runs_found_it_and_says_so(tmp_path: Path) -> None:
    env, asked = calibrated(tmp_path), ("hardware=rtx5080", "model=llama8b")
    own, off = (command("planner", "explain", *asked, *more, cwd=tmp_path, **env) for more in ((), ("calibration=off",)))
    assert own.returncode == off.returncode == 0, own.stderr + off.stderr
    assert "note: calibrated by 1 run" in own.stdout and "calibrated" not in off.stdout
    solved = json.loads(command("planner", "solve", *asked, cwd=tmp_path, **env).stdout.splitlines()[-1])
    found, without = (json.loads(result.stdout.splitlines()[-1]) for result in (own, off))
    assert found["predicted"]["decode_s_per_token"] == solved["predicted"]["decode_s_per_token"]
    assert without["predicted"]["decode_s_per_token"] < found["predicted"]["decode_s_per_token"]


def test_a_plan_keeps_between_what_its_prediction_lies(tmp_path: Path) -> None:
    result = command("planner", *SOLVE, cwd=tmp_path)
    predicted = yaml.safe_load((tmp_path / "plan.yaml").read_text())["predicted"]
    least, most = predicted["nine_in_ten"]["decode_s_per_token"]
    assert least < predicted["decode_s_per_token"] < most
    assert "Nine runs in ten: " in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["nine_in_ten"]["decode_s_per_token"] == [least, most]


def test_a_calibration_of_another_machine_is_told_of_and_a_damaged_one_refused(tmp_path: Path) -> None:
    env = calibrated(tmp_path, CALIBRATED.replace("cpu_cores: 16", "cpu_cores: 4"))
    notes = json.loads(command("planner", *SOLVE, cwd=tmp_path, **env).stdout.splitlines()[-1])["notes"]
    assert any("is of another machine" in note for note in notes)
    (tmp_path / "config" / "calibrations" / "rtx5080.yaml").write_text("runs: 3")
    line = refusal("planner", *SOLVE, cwd=tmp_path, **env)
    assert "not a calibration" in line and "calibration=off" in line
    assert "own, off" in refusal("planner", *SOLVE, "calibration=of", cwd=tmp_path, **env)
