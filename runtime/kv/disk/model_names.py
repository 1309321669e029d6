"""Models by namespace, for people: ``NAMESPACE.name`` beside the pages holds the name of the model that writes them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from penstock.planner.common.errors import UserError
from penstock.planner.common.output import write_at_once

_NAME = re.compile(r"([0-9a-f]{32})\.name")


def record_name(directory: Path, namespace: bytes, model: str) -> None:
    """Note that ``namespace`` is ``model``'s; for the process that holds the writer's lock."""
    path = directory / f"{namespace.hex()}.name"
    with contextlib.suppress(UserError):  # a full disk: pages are kept all the same, and listed without a name
        write_at_once(path, "name", lambda temporary: temporary.write_text(model, encoding="utf-8"))


def recorded_names(directory: Path) -> dict[bytes, str]:
    """What was recorded, in one line of printable text each. OSError."""
    names = {}
    for path, namespace in _files(directory):
        with contextlib.suppress(OSError):  # cleared meanwhile, or another user's
            text = path.read_text(encoding="utf-8", errors="replace")
            names[namespace] = "".join(c if c.isprintable() else " " for c in text).strip()
    return names


def forget_names(directory: Path, namespace: bytes | None = None) -> None:
    """Forget all names, or that of ``namespace``. OSError."""
    for path, found in _files(directory):
        if namespace in (None, found):
            path.unlink(missing_ok=True)


def _files(directory: Path) -> list[tuple[Path, bytes]]:
    matches = ((path, _NAME.fullmatch(path.name)) for path in directory.iterdir())
    return [(path, bytes.fromhex(match[1])) for path, match in matches if match]
