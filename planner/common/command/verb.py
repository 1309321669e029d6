"""One verb of a program, and what it accepts on a command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.planner.common.command.job import LOCAL
from penstock.planner.common.command.known_keys import keys_of
from penstock.planner.common.command.overrides import Grammar, quote
from penstock.planner.common.errors import UserError
from penstock.planner.common.user_folder import profile_dir

CONFIG = "pkg://penstock.conf"
"""Where Hydra finds the primary configs and the presets: inside the installed package."""


@dataclass(frozen=True)
class Verb:
    """One verb of a program: its ``@hydra.main`` function (the docstring is the help), schema and a worked example."""

    main: Callable[[], Any]
    schema: type
    example: str
    reads_wsm: bool = False
    words: tuple[str, ...] = ()
    """The keys that bare words set, in this order: with ``action``, ``kv list`` is ``kv action=list``."""
    instead: str | None = None
    """The key that is set instead of all that describes a problem, such as ``plan``, whose file holds it."""
    used: tuple[str, ...] = ()
    """The keys and groups that people set most, ten at most: help begins with them. Empty: the verb has few keys."""

    figures: Mapping[str, str] = field(default_factory=dict)
    """What a sweep's table shows -> where it stands in the JSON that ends the verb's output, as ``predicted.decode_tokens_per_s``."""

    @property
    def name(self) -> str:
        return self.main.__name__

    @property
    def summary(self) -> str:
        return (self.main.__doc__ or "").strip().splitlines()[0]


BESIDES: Mapping[str, str] = MappingProxyType(
    {
        "hardware": "run `planner probe` on the machine itself for hardware=local",
        "model": "plan for any other by model=hf model.checkpoint=DIR or ORG/NAME",
    }
)
"""Config group -> what serves where no preset of it does."""


def grammar_of(verb: Verb, multirun: bool, config_dir: str | None = None) -> Grammar:
    """What ``verb`` accepts here: its schema's keys, the presets, and the profiles in the user's config directory."""
    directories: list[Any] = [resources.files("penstock").joinpath("conf"), profile_dir()]
    if config_dir is not None:
        if not os.path.isdir(config_dir):
            raise UserError(f"--config-dir={config_dir}: no such directory")
        directories.append(Path(config_dir))
    groups = {}
    for entry in fields(verb.schema):
        if directories[0].joinpath(entry.name).is_dir():
            groups[entry.name] = sorted({o for directory in directories for o in _options(directory.joinpath(entry.name))})
    return Grammar(keys_of(verb.schema), groups, multirun, _absent, BESIDES)


def _options(directory: Any) -> Iterator[str]:
    if directory.is_dir():
        yield from (file.name.removesuffix(".yaml") for file in directory.iterdir() if file.name.endswith(".yaml"))


def _absent(group: str, option: str) -> str | None:
    if (group, option) == ("hardware", LOCAL):
        return f"this machine has no measured profile in {profile_dir()}; run `planner probe` first"
    return None


def own_profiles() -> list[str]:
    """The override by which Hydra finds the profiles in the user's own directory; none without one."""
    return [f"hydra.searchpath=[{quote('file://' + str(profile_dir()))}]"] if profile_dir().is_dir() else []


def spelled_out(overrides: list[str], words: tuple[str, ...]) -> list[str]:
    """``overrides`` with the first bare words as the values of the keys ``words``."""
    bare = [i for i, override in enumerate(overrides) if "=" not in override and not override.startswith("~")]
    keys = dict(zip(bare, words, strict=False))
    return [f"{keys[i]}={override}" if i in keys else override for i, override in enumerate(overrides)]
