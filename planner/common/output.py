"""Files that a verb leaves: whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError


def write_at_once(path: Path, key: str, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a file beside ``path`` with the same ending and put it in its place. UserError naming ``key`` where that fails."""
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{key}={path}: cannot be written ({error.strerror}); choose another {key}=") from error
    finally:
        temporary.unlink(missing_ok=True)


def takes_files(directory: Path) -> bool:
    """Whether a file can be made in ``directory``: tried, since permissions alone do not say so of every file system."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError:
        return False
    return True


def writable(out: Path, key: str) -> Path:
    """``out``, of which it is known before the work that a file could be written there. UserError naming ``key``."""
    if out.is_dir():
        raise UserError(f"{key}={out}: a directory; name a file")
    place = next(parent for parent in out.absolute().parents if parent.exists())
    if not takes_files(place):
        raise UserError(f"{key}={out}: {place} is not a directory that can be written to; choose another {key}=")
    return out


def write_json(path: Path, key: str, document: Mapping[str, Any]) -> None:
    """``document``, indented for people."""
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    write_at_once(path, key, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="backslashreplace"))
