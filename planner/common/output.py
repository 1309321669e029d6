"""Files that a verb leaves: whole or not at all."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import user_path


def write_at_once(path: Path, key: str, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path`` with the same ending and put it in its place. UserError naming ``key`` where that fails."""
    target = replaceable(path, key)
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(f"{key}={path}: cannot be written ({error.strerror}); choose another {key}=") from error
    finally:
        temporary.unlink(missing_ok=True)


def replaceable(path: Path, key: str) -> Path:
    """Where ``path`` leads through links: to nothing yet, or to a file. UserError naming ``key`` for all else: a file put in the place of a
    device would destroy it, as root can."""
    target = Path(os.path.realpath(path))
    try:
        mode = os.stat(target).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return target
    except OSError as error:
        raise UserError(f"{key}={path}: cannot be written ({error.strerror}); choose another {key}=") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a device, pipe or socket, which a file would replace"
        raise UserError(f"{key}={path}: {kind}; name a file")
    return target


def check_apart(places: Mapping[str, str | Path | None]) -> None:
    """UserError where two keys name one file, links followed: what a verb writes would take the place of what it reads, or wrote before."""
    seen: dict[str, str] = {}
    for key, place in places.items():
        if place is None:
            continue
        other = seen.setdefault(os.path.realpath(user_path(place)), key)
        if other != key:
            raise UserError(f"{key}={place}: {other}= names the same file; choose another {key}=")


def check_new(out: Path) -> None:
    """UserError where the directory ``out`` is to be made and something is there, or where it cannot be."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out={out}: something is there already; name a new directory")
    check_place(out, "out")


def check_place(out: Path, key: str) -> None:
    """UserError naming ``key`` where no file can be written at ``out``, whose directories need not be there yet."""
    place = next(parent for parent in (out.absolute() / "file").parents if parent.exists())
    if not takes_files(place):
        raise UserError(f"{key}={out}: {place} is not a directory that can be written to; choose another {key}=")


def takes_files(directory: Path) -> bool:
    """Whether a file can be made in ``directory``: tried, since permissions alone do not say so of every file system."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def writable(out: Path, key: str) -> Path:
    """``out``, of which it is known before the work that a file could be written there. UserError naming ``key``."""
    place = next(parent for parent in replaceable(out, key).parents if parent.exists())
    if not takes_files(place):
        raise UserError(f"{key}={out}: {place} is not a directory that can be written to; choose another {key}=")
    return out


def write_json(path: Path, key: str, document: Mapping[str, Any]) -> None:
    """``document``, indented for people."""
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    write_at_once(path, key, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="backslashreplace"))
