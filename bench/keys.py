"""``key=value`` arguments of a benchmark's command, checked one by one. Every mistake is a UserError of one line."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.planner.common.errors import UserError, nearest
from penstock.planner.common.measures import parse_bytes

PLACES = "work", "out", "profile", "llama"
"""Keys whose values are paths of one machine."""


def given_keys(arguments: Iterable[str], known: Collection[str], beside: Collection[str] = ("draw",)) -> dict[str, str]:
    """The arguments by key. All of ``known`` may be there, ``checkpoint`` must; ``beside`` are keys that the command reads itself."""
    given = given_of(arguments, known, beside)
    if "checkpoint" not in given:
        raise UserError("checkpoint: missing; give a Hugging Face checkpoint's directory, checkpoint=DIR")
    return given


def given_of(arguments: Iterable[str], known: Collection[str], beside: Collection[str] = ()) -> dict[str, str]:
    """The arguments by key, each of ``known``."""
    given = dict(a.partition("=")[::2] for a in arguments)
    for key in given:
        if key not in known:
            raise UserError(f"{key}: choose from {', '.join((*beside, *known))}{nearest(key, known)}")
    return given


def told_keys(given: Mapping[str, str]) -> dict[str, str]:
    """What a result says of its command: all but places of the machine."""
    return {key: value for key, value in given.items() if key not in PLACES}


def read_values(given: Mapping[str, str], paths: Iterable[str], sizes: Iterable[str], whole: Mapping[str, int]) -> dict[str, Any]:
    """Those of ``given`` that are paths, sizes in bytes, or whole numbers not below the least that ``whole`` has for them."""
    values: dict[str, Any] = {key: Path(given[key]).expanduser().resolve() for key in paths if key in given}
    for key in sizes:
        if key in given:
            values[key] = parse_bytes(given[key])
            if values[key] is None:
                raise UserError(f"{key}={given[key]}: must be a size such as 6GiB")
    for key, least in whole.items():
        if key in given:
            if not given[key].isdecimal() or int(given[key]) < least:
                raise UserError(f"{key}={given[key]}: must be a whole number, {least} or more")
            values[key] = int(given[key])
    return values


def read_names(given: Mapping[str, str], key: str, choices: Collection[str]) -> dict[str, tuple[str, ...]]:
    """``key``'s comma list, each of ``choices``; empty when it was not given."""
    if key not in given:
        return {}
    names = tuple(given[key].split(","))
    for name in names:
        if name not in choices:
            raise UserError(f"{key}={name}: choose from {', '.join(choices)}{nearest(name, choices)}")
    return {key: names}
