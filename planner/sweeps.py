"""Where a multirun writes: the next free ``sweeps/N`` of the current directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.errors import UserError
from planner.overrides import quote

SWEEP_CONFIG = "multirun.yaml"
"""What Hydra writes into a sweep's directory before its first job."""


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
