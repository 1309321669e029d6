"""Paths as a user writes them, and where a user's own configuration lies."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.planner.common.errors import UserError


def user_path(text: str | Path) -> Path:
    """``text`` with the ``~`` of a home that is known in its place. Any other ``~`` is part of a name, as shells have it."""
    return Path(os.path.expanduser(text))


def home_path() -> Path:
    """The user's own directory. UserError where none is known, as in a container whose user has no entry in /etc/passwd."""
    home = user_path("~")
    if not home.is_absolute():
        raise UserError(
            f"HOME={os.environ.get('HOME', '')}: no home directory is known for this user; set HOME to one, as an absolute path"
        )
    return home


def profile_dir() -> Path:
    """The user's config directory: $PENSTOCK_CONFIG_DIR, else $XDG_CONFIG_HOME/penstock, else ~/.config/penstock.

    Profiles live in its ``hardware/NAME.yaml``.
    """
    own, xdg = os.environ.get("PENSTOCK_CONFIG_DIR"), os.environ.get("XDG_CONFIG_HOME")
    if own:
        return user_path(own)
    return (user_path(xdg) if xdg else home_path() / ".config") / "penstock"


def cache_dir() -> Path:
    """Where what can be found out again is kept: $PENSTOCK_CACHE_DIR, else $XDG_CACHE_HOME/penstock, else ~/.cache/penstock."""
    own, xdg = os.environ.get("PENSTOCK_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return user_path(own)
    return (user_path(xdg) if xdg else home_path() / ".cache") / "penstock"
