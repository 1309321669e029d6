"""The package as a user gets it: one name, the same modules however it is installed, and both programs at work in an empty directory."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest
import yaml

from tests.cli import HANGS_S, ROOT

WINGS = ("planner", "runtime", "conf")
"""Folders at the top of the tree, which links make packages of ``penstock``."""
README_SCREEN = 40
FROM_TOP = re.compile(r"\b(?:from|import|pkg://)\s*(?:planner|runtime|conf)\b(?!/)")
"""A line of Python within a string, or Hydra's address of a package, that names a wing without its house."""
MAY_IMPORT = re.compile(rf"{FROM_TOP.pattern}|^\s*(?:from\s+\.|import\b.*\b(?:planner|runtime|conf)\b)", re.MULTILINE)
"""What stands in every file with a wrong import, and in few others; only those are parsed."""


def tree_files() -> set[str]:
    """Everything that belongs to the package, named as it is to be installed."""
    inside = {f"penstock/{path.relative_to(ROOT)}": path for wing in WINGS for path in (ROOT / wing).rglob("*")}
    inside |= {f"penstock/{path.name}": path for path in (ROOT / "penstock").glob("*")}
    return {
        name
        for name, path in inside.items()
        if path.suffix in (".py", ".yaml", ".c", ".h", ".typed", ".html", ".css", ".js", ".svg") and "__pycache__" not in path.parts
    }


def packages(files: Iterable[str]) -> set[str]:
    """The folders of ``files`` that are regular packages."""
    return {str(PurePosixPath(name).parent) for name in files if name.endswith("/__init__.py")}


def finished(line: list[str], cwd: Path, **env: str) -> str:
    """What ``line`` prints. It ends well."""
    result = subprocess.run(line, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def pip(*args: str, cwd: Path) -> None:
    """pip as on a machine without network, with the build tools that are installed here."""
    finished([sys.executable, "-m", "pip", *args, "--no-deps", "--no-index", "-q"], cwd)


def backend(hook: str, source: Path, out: Path, **env: str) -> None:
    """What pip asks of the build backend, without pip."""
    finished([sys.executable, "-c", f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"], source, **env)


COMPILER = """#!{python} -IS
import hashlib, os, pathlib, shutil, sys
real, kept, given = {real!r}.split(), pathlib.Path({kept!r}), sys.argv[1:]
if "-c" not in given or "-o" not in given:
    os.execvp(real[0], [*real, *given])
out = given.pop(given.index("-o") + 1)
told = hashlib.sha256(" ".join(given).encode())
headers = (path for wing in ("planner", "runtime") for path in pathlib.Path(wing).rglob("*.h"))
for path in [given[given.index("-c") + 1], *sorted(headers)]:
    told.update(str(path).encode() + pathlib.Path(path).read_bytes())
known = kept / told.hexdigest()
if not known.exists():
    given.remove("-o")
    source = given.index("-c") + 1
    if "/native/" in given[source]:
        if status := os.spawnvp(os.P_WAIT, real[0], [*real, *given, "-E", "-o", os.devnull]):
            sys.exit(status)
        given[source] = str(kept / "empty.c")
    given += ["-o", out]
    if status := os.spawnvp(os.P_WAIT, real[0], [*real, *given, "-O0"]):
        sys.exit(status)
    shutil.copy(out, known)
shutil.copy(known, out)
"""
"""Without optimising, and what has the same words, source and headers only once. Of kernels, which this environment has compiled, every
header is read and nothing is computed: their code takes eleven seconds."""


@pytest.fixture(scope="module")
def quick_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is built here is looked for and loaded, and computes nothing."""
    directory = tmp_path_factory.mktemp("compiler")
    (directory / "kept").mkdir()
    (directory / "kept" / "empty.c").write_text("extern int nothing;\n")
    compiler = directory / "cc"
    compiler.write_text(COMPILER.format(python=sys.executable, real=sysconfig.get_config_var("CC"), kept=str(directory / "kept")))
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", str(compiler))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, quick_compiler: None) -> Path:
    """A clone: sources and links, nothing built."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed here")
    directory = tmp_path_factory.mktemp("source")
    for name in ("penstock", *WINGS):
        shutil.copytree(ROOT / name, directory / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    return directory


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    backend("build_sdist", source, out)
    with tarfile.open(next(out.glob("penstock-*.tar.gz"))) as archive:
        archive.extractall(out, filter="data")
    return next(path for path in out.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution."""
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-build-isolation", "-w", str(out), str(sdist), cwd=out)
    return next(out.glob("penstock-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that the wheel is installed into, scripts in its ``bin``."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-compile", "--target", str(target), str(wheel), cwd=target)
    return target


@pytest.fixture(scope="module")
def editable(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of packages where the clone is installed as one that may be edited."""
    target = tmp_path_factory.mktemp("editable")
    pip("install", "--no-build-isolation", "--target", str(target), "-e", str(source), cwd=target)
    return target


def run(installed: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    line = [sys.executable, "-P", str(installed / "bin" / args[0]), *args[1:]]
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=HANGS_S)


def test_the_wheel_holds_the_packages_and_files_of_the_tree_and_no_others(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packages(held) == packages(tree_files())
    assert {name for name in held if not name.endswith(".so")} == tree_files()
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_a_wheel_that_is_built_from_the_clone_holds_the_same(source: Path, wheel: Path, tmp_path: Path) -> None:
    backend("build_wheel", source, tmp_path)
    from_clone = next(tmp_path.glob("penstock-*.whl"))
    assert set(zipfile.ZipFile(from_clone).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_one_name_is_installed(installed: Path) -> None:
    top = {path.name for path in installed.iterdir()} - {"bin", "__pycache__"}
    assert {name for name in top if not name.endswith(".dist-info")} == {"penstock"}


def test_the_source_distribution_needs_no_links(sdist: Path) -> None:
    assert not [path for path in sdist.rglob("*") if path.is_symlink()]


PLACE = "import pathlib, penstock.planner; print(pathlib.Path(penstock.planner.__file__).resolve())"
"""Needs nothing but the standard library, so it runs with ``-S``, without this environment's packages."""


def test_penstock_is_found_in_the_clone_by_itself_and_elsewhere_by_its_path(source: Path, tmp_path: Path) -> None:
    bare = [sys.executable, "-S", "-c", PLACE]
    assert Path(finished(bare, source, PYTHONPATH="")).is_relative_to(source)
    assert Path(finished(bare, tmp_path, PYTHONPATH=str(source))).is_relative_to(source)


def test_the_wheel_is_found_in_the_clone_and_elsewhere(installed: Path, source: Path, tmp_path: Path) -> None:
    bare = [sys.executable, "-S", "-c", PLACE]
    assert Path(finished(bare, source, PYTHONPATH=str(installed))).is_relative_to(source), "the clone comes first in the clone"
    assert Path(finished(bare, tmp_path, PYTHONPATH=str(installed))).is_relative_to(installed)


def test_an_editable_install_is_found_in_the_clone_and_elsewhere(editable: Path, source: Path, tmp_path: Path) -> None:
    bare = [sys.executable, "-S", "-c", f"import site; site.addsitedir({str(editable)!r}); {PLACE}"]
    for cwd in (source, tmp_path):
        assert Path(finished(bare, cwd, PYTHONPATH="")).is_relative_to(source)
    assert list(source.rglob("_native*.so")), "expert policies are compiled beside their sources"
    assert list(source.rglob("_decoders*.so")), "so are the formats' decoders"


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("planner", "runtime", "conf", "penstock", "tests", "bench", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if MAY_IMPORT.search(text):
                yield path, ast.parse(text)


def test_no_file_imports_a_wing_from_the_top() -> None:
    wrong = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = ["." * node.level + (node.module or "")]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path != Path(__file__).resolve():
                names = ["conf" for _ in FROM_TOP.findall(node.value)]
            else:
                continue
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno}" for name in names if name.partition(".")[0] in WINGS or name[0] == "."]
    assert wrong == []


def test_importing_penstock_imports_neither_torch_nor_hydra(tmp_path: Path) -> None:
    code = "import sys, penstock; print({'torch', 'transformers', 'hydra', 'pulp', 'numpy'} & set(sys.modules))"
    assert finished([sys.executable, "-P", "-c", code], tmp_path, PYTHONPATH=str(ROOT)) == "set()"


COMPILED = (
    "planner/contract/experts/policies/_native",
    "runtime/formats/native/_decoders",
    "runtime/beside/native/_products",
    "runtime/reading/native/_readers",
)


@pytest.mark.parametrize("place", COMPILED)
def test_what_is_written_in_c_is_compiled_into_the_wheel(installed: Path, place: str) -> None:
    assert list(installed.glob(f"penstock/{place}*.so"))


def test_expert_policies_are_found_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    code = "from penstock.planner.contract.experts.policies.native import library; print(library()._name)"
    result = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).is_relative_to(installed)


def test_without_a_compiler_the_wheel_is_built_and_numpy_decides(source: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(source, clone, symlinks=True, ignore=shutil.ignore_patterns("build", "*.so", "*.egg-info"))
    backend("build_wheel", clone, tmp_path, CC="/no/compiler")
    with zipfile.ZipFile(next(tmp_path.glob("penstock-*.whl"))) as wheel:
        assert not [name for name in wheel.namelist() if name.endswith(".so")]
        wheel.extractall(tmp_path / "installed")
    code = "from penstock.planner.contract.experts.policies.native import library; print(type(library()).__name__)"
    assert finished([sys.executable, "-P", "-c", code], tmp_path, PYTHONPATH=str(tmp_path / "installed")) == "Uncompiled"


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


def test_the_metadata_asks_for_what_the_programs_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "penstock"
    assert project["requires-python"] == ">=3.11"
    assert {"torch>=2.11", "transformers>=5.17,<6", "hydra-core>=1.3.8"} <= set(project["dependencies"])
    assert set(project["scripts"]) == {"planner", "runtime"}


def test_the_newest_of_the_changes_is_the_packages_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == project["version"]


def test_the_workflow_checks_every_python_that_is_promised() -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make lint", "make test"]


def test_the_first_screen_of_the_readme_is_forty_lines_at_most() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    first_section = next(number for number, line in enumerate(lines) if line.startswith("## "))
    assert 0 < first_section <= README_SCREEN


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert os.access(script, os.X_OK)
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make test"]
