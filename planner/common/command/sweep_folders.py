"""Where a multirun writes: the next free ``sweeps/N`` of the current directory, in it a directory for each point with what became of it."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.planner.common.command.overrides import key_of, quote, split_commas, unquoted
from penstock.planner.common.errors import UserError, nearest

SWEEP_CONFIG = "multirun.yaml"
"""What Hydra writes into a sweep's directory before its first job."""

POINT = "point.json"
"""What each point leaves in its directory, also one that failed."""
OUTPUT = "output.txt"
"""What a point would have printed."""

FILES = ("out", "html", "plot", "trace", "moe.record")
"""Keys of files that a verb leaves: in a sweep each point leaves its own."""

LAUNCHERS = {
    "basic": ("hydra", ""),
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "hydra-joblib-launcher"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "hydra-submitit-launcher"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "hydra-submitit-launcher"),
}
"""Launcher -> its module, and the distribution that installs it."""

DIED = ("TerminatedWorkerError", "BrokenProcessPool", "UncompletedJobError", "FailedJobError")
"""What joblib and submitit raise when a process of theirs was killed."""


@dataclass(frozen=True)
class Point:
    """One point of a sweep: what was asked, and what became of it."""

    verb: str
    """With its program: ``planner solve``."""
    number: int
    overrides: tuple[str, ...]
    status: int
    """0, that of the verb, or 2 after a mistake or where no plan fits, 1 after a bug."""
    error: str | None
    """The one line of what failed."""
    figures: Mapping[str, str | float | None] = field(default_factory=dict)
    """The verb's few that a sweep is made for, by what they are called."""
    files: tuple[str, ...] = ()
    """What it left, as seen from where the sweep began."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "overrides": list(self.overrides), "files": list(self.files)}


def write_point(directory: Path, point: Point) -> None:
    """Leave ``point`` in its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / POINT).write_text(json.dumps(point.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_point(path: Path) -> Point | None:
    """The point in the file ``path``; None where it is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        asked, left = tuple(map(str, data["overrides"])), tuple(map(str, data["files"]))
        return Point(str(data["verb"]), int(data["number"]), asked, int(data["status"]), data["error"], dict(data["figures"]), left)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_points(directory: Path) -> list[Point]:
    """Of the sweep in ``directory``, in order."""
    points = [point for path in directory.glob(f"*/{POINT}") if (point := read_point(path)) is not None]
    return sorted(points, key=lambda point: point.number)


def death_of_worker(error: Exception) -> UserError | None:
    """The one line for ``error`` where it says that a launcher's process was killed; its point left nothing, which a report tells."""
    if type(error).__name__ not in DIED:
        return None
    return UserError(f"a process of the sweep was killed ({type(error).__name__}), often for memory; `planner report` has the other points")


def check_launcher(overrides: Collection[str]) -> None:
    """Raise UserError for a launcher that is none, or is not installed."""
    name = next((o.partition("=")[2].strip() for o in overrides if key_of(o) == "hydra/launcher"), "basic")
    if name not in LAUNCHERS:
        raise UserError(f"hydra/launcher={name}: no such launcher; choose of {', '.join(LAUNCHERS)}{nearest(name, LAUNCHERS)}")
    module, distribution = LAUNCHERS[name]
    if not _installed(module):
        raise UserError(f"hydra/launcher={name}: not installed here; pip install {distribution}, or leave it out to run one by one")


def check_files(overrides: Collection[str]) -> None:
    """Raise UserError for a file outside the points' directories that all of them would write."""
    for override in overrides:
        key, value = key_of(override), override.partition("=")[2]
        names = [unquoted(part.strip()) for part in split_commas(value)] if key in FILES else []
        if len(names) == 1 and (names[0].startswith(("/", "~")) or os.path.normpath(names[0]).split(os.sep)[0] == os.pardir):
            raise UserError(
                f"{key}={names[0]}: all points of the sweep would write it, and each has a directory; set {key}={Path(names[0]).name}"
            )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@contextmanager
def sweep_directory(wanted: bool) -> Iterator[list[str]]:
    """The override that sends a sweep's output to the next free ``sweeps/N``; the directory goes away when no job began."""
    if not wanted:
        yield []
        return
    try:
        directory = _claim(Path("sweeps"))
    except OSError as error:
        raise UserError(f"sweeps: cannot make a directory for the sweep here ({error.strerror})") from error
    try:
        yield [f"hydra.sweep.dir={quote(str(directory))}"]
    finally:
        if {entry.name for entry in directory.iterdir()} <= {SWEEP_CONFIG}:
            (directory / SWEEP_CONFIG).unlink(missing_ok=True)
            directory.rmdir()
        if not any(directory.parent.iterdir()):
            directory.parent.rmdir()


def _claim(parent: Path) -> Path:
    parent.mkdir(exist_ok=True)
    taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isdigit()]
    number = max(taken, default=-1) + 1
    while True:
        try:
            (parent / str(number)).mkdir()
            return parent / str(number)
        except FileExistsError:
            number += 1
