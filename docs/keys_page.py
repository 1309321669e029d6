"""Prints docs/keys.md, every key of every verb, from the schemas and their docstrings: `make keys` writes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import resources
from typing import Any, get_type_hints

from penstock.planner.cli import PROGRAM as PLANNER
from penstock.planner.common.command.app import Program
from penstock.planner.common.command.known_keys import Key, keys_of, strip_none
from penstock.runtime.cli import PROGRAM as RUNTIME

HEAD = """\
# Every key

Written by `make keys` from the docstrings in `planner/contract/decided/decisions.py`, `planner/contract/config/config_schema.py`,
`planner/asked/verb_schema.py` and `runtime/asked/run_schema.py`; change it there.

A key is set with `key=value`. A size may be written `6GiB`. Under `--multirun` a comma list tries each value. Keys with a dot belong to a
section; sections that several verbs share are listed once, at the end.
"""


def verbs() -> list[tuple[str, str, type]]:
    """(program and verb, what it does, schema)."""
    programs: tuple[Program, ...] = (PLANNER, RUNTIME)
    return [(f"{program.name} {verb.name}", verb.summary, verb.schema) for program in programs for verb in program.verbs]


def sections() -> dict[tuple[str, type], list[str]]:
    """(section, its dataclass) -> the verbs that have it."""
    found: dict[tuple[str, type], list[str]] = {}
    for verb, _, schema in verbs():
        for name, kind in _nested(schema):
            found.setdefault((name, kind), []).append(verb)
    return found


def _nested(schema: type) -> Iterator[tuple[str, type]]:
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind, _ = strip_none(hints[field.name])
        if dataclasses.is_dataclass(kind):
            yield field.name, kind


def page() -> str:
    return "\n".join([HEAD, *_verbs(), "## Sections\n", *_sections()])


def _verbs() -> Iterator[str]:
    for verb, summary, schema in verbs():
        nested = [name for name, _ in _nested(schema)]
        yield f"## {verb}\n\n{summary[0].upper()}{summary[1:]}.\n"
        own = [key for path, key in keys_of(schema).items() if "." not in path]
        if own:
            yield _table(own)
        if nested:
            yield f"Sections: {', '.join(f'`{name}.`' for name in nested)}.\n"


def _sections() -> Iterator[str]:
    for (name, kind), used in sections().items():
        yield f"### `{name}.` of {', '.join(used)}\n"
        doc = (kind.__doc__ or "").strip()
        if doc and not doc.startswith(kind.__name__ + "("):
            yield f"{' '.join(doc.split())}\n"
        if presets := _presets(name):
            yield f"Presets, chosen with `{name}=`: {', '.join(presets)}.\n"
        yield _table(list(keys_of(kind, f"{name}.").values()))


def _presets(group: str) -> list[str]:
    directory = resources.files("conf").joinpath(group)
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def _table(keys: list[Key]) -> str:
    rows = [f"| `{key.path}` | {_default(key)} | {_cell(key.allowed)} | {_cell(key.doc)} |" for key in keys]
    return "\n".join(["| key | default | allowed | meaning |", "|---|---|---|---|", *rows, ""])


def _default(key: Key) -> str:
    shown: Any = key.shown_default
    return "required" if shown == "???" else f"`{_cell(shown)}`" if shown != "" else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
