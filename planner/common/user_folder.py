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
