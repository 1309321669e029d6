"""`--multirun`, one by one and by launchers: a point that fails is a row, not the end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import yaml

from penstock.planner.common.command.sweep_folders import LAUNCHERS, check_files, check_launcher, read_points
from penstock.planner.common.errors import UserError
from penstock.planner.contract.config.config_schema import SolveConfig
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.plan.planfile import write_plan
from penstock.planner.report.gather import SILENT
from penstock.planner.verbs import solve_verb
from tests.cli import HANGS_S, ROOT, command, process, refusal
from tests.support import decisions, plan_for, save_tiny

WAITS = "hydra/launcher=submitit_local"
"""It waits for the result of a process that was killed."""
TWO_AT_A_TIME = {"joblib": ("hydra.launcher.n_jobs=2",)}
"""It starts ten processes, each of which imports what the two that get a point need."""
SOLVE = ("solve", "hardware=rtx5080", "model=llama8b", "hardware.vram_bytes=1GiB,8GiB", "workload.batch=2", "--multirun")
IN_PROCESSES = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec("hydra_plugins." + module) is None, reason=f"{name} is not installed here"))
    for name, module in (("joblib", "hydra_joblib_launcher"), ("submitit_local", "hydra_submitit_launcher"))
]


@pytest.mark.parametrize("launcher", IN_PROCESSES)
def test_every_launcher_leaves_the_same_rows(launcher: str, tmp_path: Path) -> None:
    leaves_its_rows(process("planner", *SOLVE, f"hydra/launcher={launcher}", *TWO_AT_A_TIME.get(launcher, ()), cwd=tmp_path), tmp_path)


def leaves_its_rows(result: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    assert result.returncode == 2, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["sweep"], told["points"], told["failed"]) == ("sweeps/0", 2, 1)
    points = read_points(tmp_path / "sweeps" / "0")
    assert [point.as_json() for point in points] == told["rows"]
    assert [(point.status, (point.error or "")[:12]) for point in points] == [(2, "no plan fits"), (0, "")]
    assert points[1].overrides == ("hardware=rtx5080", "model=llama8b", "hardware.vram_bytes=8589934592", "workload.batch=2")
    assert [(tmp_path / "sweeps" / "0" / str(n) / "plan.yaml").is_file() for n in range(2)] == [False, True]
    assert [point.files for point in points] == [(), ("sweeps/0/1/plan.yaml",)] and set(points[1].figures) == {"tokens/s", "bound by"}
    said = (tmp_path / "sweeps" / "0" / "1" / "output.txt").read_text(encoding="utf-8")
    assert json.loads(said.splitlines()[-1])["predicted"]["decode_tokens_per_s"] == points[1].figures["tokens/s"]


def test_a_sweep_prints_a_line_a_point_and_one_table(tmp_path: Path) -> None:
    result = command("planner", *SOLVE, cwd=tmp_path)
    leaves_its_rows(result, tmp_path)
    (fails,) = [line for line in result.stderr.splitlines() if line.startswith("[")]
    assert fails.startswith("[0]  hardware.vram_bytes=1073741824  no plan fits: VRAM is short by")
    point, head, first, second, end, _ = result.stdout.splitlines()
    assert re.fullmatch(r"\[1\]  hardware.vram_bytes=8589934592  [0-9.]+ tokens/s, bound by \w+  sweeps/0/1/plan.yaml", point)
    assert head.split() == ["hardware.vram_bytes", "tokens/s", "bound", "by"], "what all points share is no column"
    assert first.split() == ["0", "1073741824", "-", "-", "no", "plan", "fits"] and second.split()[-1] == "sweeps/0/1/plan.yaml"
    assert end.startswith("sweeps/0: 2 points, 1 failed; what each said is in its output.txt")


def test_runs_are_swept_too_and_reported_beside_what_was_predicted(tmp_path: Path) -> None:
    write_plan(plan_for(save_tiny(tmp_path / "model", layers=8), decisions()), tmp_path / "tiny.yaml")
    sweep = ("plan=tiny.yaml", "max_new_tokens=2", "force.cap_layers=1,77,3", "--multirun")
    result = command("runtime", "run", *sweep, cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert [row["status"] for row in told["rows"]] == [0, 2, 0] and "force.cap_layers=77" in told["rows"][1]["error"]
    assert all(row["figures"]["tokens/s"] > 0 and row["figures"]["predicted/measured"] > 0 for row in told["rows"][::2])
    reported = command("planner", "report", "sweeps/0", cwd=tmp_path)
    assert reported.returncode == 0, reported.stderr
    rows = json.loads((tmp_path / "sweeps" / "0" / "report.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == ["run", "failed", "run"]
    assert all(row["predicted_over_measured"] > 0 and row["model"] for row in rows if row["kind"] == "run")


def test_each_point_records_the_routings_of_its_own(tmp_path: Path) -> None:
    write_plan(plan_for(save_tiny(tmp_path / "model", "mixtral", layers=2), decisions()), tmp_path / "tiny.yaml")
    sweep = ("plan=tiny.yaml", "max_new_tokens=2,3", "moe.record=routings.jsonl", "--multirun")
    result = command("runtime", "run", *sweep, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    files = [point.files for point in read_points(tmp_path / "sweeps" / "0")]
    assert files == [(f"sweeps/0/{k}/routings.jsonl", f"sweeps/0/{k}/run.json") for k in range(2)]
    assert not (tmp_path / "routings.jsonl").exists()


def killed(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """A sweep of three points, of which the second kills whatever process it runs in: each imports ``sitecustomize``."""
    lines = ["import submitit.core.core", "submitit.core.core.Job._results_timeout_s = 1"] if WAITS in args else []
    lines += ["import os", "import penstock.planner.verbs.solve_verb as solve", "make = solve.make_plan", "def second(cfg):"]
    lines += ["    if cfg.workload.new_tokens == 9: os.kill(os.getpid(), 9)", "    return make(cfg)", "solve.make_plan = second"]
    (directory / "patch").mkdir()
    (directory / "patch" / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    path = os.pathsep.join([str(directory / "patch"), str(ROOT)])
    sweep = ("solve", "hardware=rtx5080", "model=llama8b", "workload.new_tokens=8,9,10", "--multirun", *args)
    code = "import sys; sys.argv[0] = 'planner'; from penstock.planner.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-c", code, *sweep], cwd=directory, env=env, capture_output=True, text=True, timeout=HANGS_S)


def test_a_bug_in_one_point_is_a_row_with_its_traceback_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = solve_verb.make_plan

    def second(cfg: SolveConfig) -> Plan:
        if cfg.workload.new_tokens == 9:
            raise ZeroDivisionError("by nine")
        return make(cfg)

    monkeypatch.setattr(solve_verb, "make_plan", second)
    result = command("planner", "solve", "hardware=rtx5080", "model=llama8b", "workload.new_tokens=8,9,10", "--multirun", cwd=tmp_path)
    assert result.returncode == 1
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["error"] for row in rows] == [None, "ZeroDivisionError: by nine", None]
    assert "Traceback" in result.stderr


@pytest.mark.parametrize("launcher", IN_PROCESSES[:1])
def test_a_point_whose_process_was_killed_is_told_in_one_line_and_is_a_row_of_the_report(launcher: str, tmp_path: Path) -> None:
    result = killed(tmp_path, f"hydra/launcher={launcher}", *TWO_AT_A_TIME.get(launcher, ()))
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("planner: a process of the sweep was killed") and "Traceback" not in result.stderr
    assert command("planner", "report", "sweeps/0", cwd=tmp_path).returncode == 0
    rows = {row["path"]: row for row in json.loads((tmp_path / "sweeps" / "0" / "report.json").read_text())["rows"]}
    assert rows["1"]["error"] == SILENT
    assert launcher == "joblib" or {"0/plan.yaml", "2/plan.yaml"} <= set(rows), "joblib's other processes end with the one that was killed"


def test_a_launcher_that_is_none_or_not_installed_is_one_line(tmp_path: Path) -> None:
    line = refusal("planner", *SOLVE, "hydra/launcher=jobli", cwd=tmp_path)
    assert "hydra/launcher=jobli" in line and "did you mean joblib?" in line
    with mock.patch("penstock.planner.common.command.sweep_folders.find_spec", return_value=None):
        for name, (_, distribution) in LAUNCHERS.items():
            if distribution:
                with pytest.raises(UserError, match=f"not installed here; pip install {distribution},"):
                    check_launcher([f"hydra/launcher={name}"])


@pytest.mark.parametrize("out", ["/tmp/plan.yaml", "../plan.yaml", "'a/../../plan.yaml'", "~/plan.yaml"])
def test_a_file_that_all_points_would_share_is_refused_before_the_first_one(out: str, tmp_path: Path) -> None:
    line = refusal("planner", *SOLVE, f"out={out}", cwd=tmp_path)
    assert "all points of the sweep would write it, and each has a directory; set out=plan.yaml" in line
    check_files(["out=/tmp/a.yaml,/tmp/b.yaml"])


@pytest.mark.skipif(find_spec("hydra_plugins.hydra_submitit_launcher") is None, reason="submitit is not installed here")
def test_the_slurm_launcher_takes_the_keys_that_the_page_names(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    keys = re.findall(r"hydra/launcher=submitit_slurm|hydra\.launcher\.(?!n_jobs)\w+=\w+", page)
    assert len(keys) >= 4
    result = command("planner", "solve", "hardware=rtx5080", "model=llama8b", *keys, "--cfg", "hydra", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    launcher = yaml.safe_load(result.stdout)["hydra"]["launcher"]
    assert launcher["_target_"].endswith("SlurmLauncher")
    assert all(str(launcher[key.split(".")[2].split("=")[0]]) == key.split("=")[1] for key in keys if "launcher." in key)
