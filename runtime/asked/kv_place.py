"""Where KV pages are kept when nobody says where."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.planner.common.user_folder import home_path, user_path

AUTO = "auto"
"""The name that stands for the user's own directory; one of that name is `./auto`."""
_OF_RANK = re.compile(r"rank-(\d+)-of-(\d+)")


def directory(name: str) -> Path:
    """The directory that ``name`` means; ``auto`` is $XDG_CACHE_HOME/penstock/kv, or ~/.cache/penstock/kv."""
    if name != AUTO:
        return user_path(name)
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (user_path(xdg) if xdg else home_path() / ".cache") / "penstock" / "kv"


def folder_of_rank(place: Path, rank: int, count: int) -> Path:
    """Where ``rank`` of ``count`` keeps the pages of its layers, in the directory ``place``."""
    return place / f"rank-{rank}-of-{count}"


def folders(place: Path) -> list[Path]:
    """``place``, which one process writes to, and behind it those of ranks in it, by their numbers."""
    found = [(tuple(map(int, reversed(named.groups()))), each) for each in place.glob("rank-*") if (named := _OF_RANK.fullmatch(each.name))]
    return [place, *(each for _, each in sorted(found) if each.is_dir())]
