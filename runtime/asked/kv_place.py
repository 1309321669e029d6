"""Where KV pages are kept when nobody says where."""

from __future__ import annotations

import os
from pathlib import Path

AUTO = "auto"
"""The name that stands for the user's own directory; one of that name is `./auto`."""


def directory(name: str) -> Path:
    """The directory that ``name`` means; ``auto`` is $XDG_CACHE_HOME/penstock/kv, or ~/.cache/penstock/kv."""
    if name != AUTO:
        return Path(name).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg).expanduser() if xdg else Path.home() / ".cache") / "penstock" / "kv"
