"""The package as a user gets it: a wheel with everything in it, and both programs at work in an empty directory."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README_SCREEN = 40


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources without network."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed here")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("penstock", "planner", "runtime", "conf"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(out), str(source)]
    result = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return next(out.glob("penstock-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the wheel is installed into, scripts in its ``bin``."""
    target = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "-q", "--target", str(target), str(wheel)]
    result = subprocess.run(install, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return target


def run(installed: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    line = [sys.executable, "-P", str(installed / "bin" / args[0]), *args[1:]]
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_the_wheel_holds_every_module_and_every_preset(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"penstock/{path.relative_to(ROOT)}"
        for name in ("planner", "runtime", "conf")
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".yaml", ".c") and "__pycache__" not in path.parts
    }
    assert wanted <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_expert_policies_are_compiled_into_the_wheel(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    code = "from penstock.planner.contract.experts.policies.native import library; print(library()._name)"
    result = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(installed)


def test_the_wheel_holds_no_tests(wheel: Path) -> None:
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(("tests/", "bench/"))]


def test_planner_solves_from_the_wheel_in_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    result = run(installed, tmp_path, "planner", "solve", "hardware=rtx5080", "model=llama70b")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["model"] == "llama70b"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


def test_runtime_refuses_from_the_wheel_in_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    listed = run(installed, tmp_path, "runtime")
    assert listed.returncode == 0
    assert "runtime run" in listed.stdout
    refused = run(installed, tmp_path, "runtime", "run", "plan=none.yaml")
    assert refused.returncode == 2, refused.stderr
    assert "none.yaml" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_programs_come_from_the_wheel_and_not_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    code = "from penstock import conf, planner, runtime; print(planner.__file__, runtime.__file__, conf.__file__)"
    result = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert all(Path(path).is_relative_to(installed) for path in result.stdout.split())


def test_the_metadata_asks_for_what_the_programs_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "penstock"
    assert project["requires-python"] == ">=3.11"
    assert {"torch>=2.11", "transformers>=5.17,<6", "hydra-core>=1.3.8"} <= set(project["dependencies"])
    assert set(project["scripts"]) == {"planner", "runtime"}


def test_the_first_screen_of_the_readme_is_forty_lines_at_most() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    first_section = next(number for number, line in enumerate(lines) if line.startswith("## "))
    assert 0 < first_section <= README_SCREEN


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert os.access(script, os.X_OK)
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make test"]
