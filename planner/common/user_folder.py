"""Where a user's own configuration lies."""

from __future__ import annotations

import os
from pathlib import Path


def profile_dir() -> Path:
    """The user's config directory: $PENSTOCK_CONFIG_DIR, else $XDG_CONFIG_HOME/penstock, else ~/.config/penstock.

    Profiles live in its ``hardware/NAME.yaml``.
    """
    own, xdg = os.environ.get("PENSTOCK_CONFIG_DIR"), os.environ.get("XDG_CONFIG_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(xdg).expanduser() if xdg else Path.home() / ".config") / "penstock"


def cache_dir() -> Path:
    """Where what can be found out again is kept: $PENSTOCK_CACHE_DIR, else $XDG_CACHE_HOME/penstock, else ~/.cache/penstock."""
    own, xdg = os.environ.get("PENSTOCK_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(xdg).expanduser() if xdg else Path.home() / ".cache") / "penstock"
