"""The measured profile as a file that ``hardware=NAME`` finds."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import terminate_as_interrupt
from penstock.planner.common.user_folder import profile_dir

if TYPE_CHECKING:
    from penstock.planner.contract.config.config_schema import HardwareConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def profile_path(name: str) -> Path:
    """Where the profile ``name`` lives; UserError when that cannot be a file's name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"probe.name={name} cannot name a profile; use letters, digits, '.', '_' and '-'")
    return profile_dir() / "hardware" / f"{name}.yaml"


def prepare_directory(path: Path) -> None:
    """Make the directory of ``path``; UserError when a file cannot be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _refused(path, error) from error


def write_profile(name: str, config: HardwareConfig) -> Path:
    """Write ``hardware/NAME.yaml`` whole or not at all: aside, flushed to the disk, renamed. Returns its path.

    UserError when the name cannot be a file's or the directory cannot be written.
    """
    from omegaconf import OmegaConf

    path = profile_path(name)
    prepare_directory(path)
    try:
        with terminate_as_interrupt():
            _replace(path, OmegaConf.to_yaml(OmegaConf.structured(config)))
    except OSError as error:
        raise _refused(path, error) from error
    return path


def _refused(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write the profile {path}: {error.strerror}; set PENSTOCK_CONFIG_DIR to a directory of yours with room")


def _replace(path: Path, text: str) -> None:
    fd, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
