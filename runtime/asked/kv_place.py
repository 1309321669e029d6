"""Where KV pages are kept when nobody says where."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.planner.common.user_folder import home_path, user_path

AUTO = "auto"
"""The name that stands for the user's own directory; one of that name is `./auto`."""


def directory(name: str) -> Path:
    """The directory that ``name`` means; ``auto`` is $XDG_CACHE_HOME/penstock/kv, or ~/.cache/penstock/kv."""
    if name != AUTO:
        return user_path(name)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (user_path(xdg) if xdg else home_path() / ".cache") / "penstock" / "kv"
