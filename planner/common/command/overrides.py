"""Command-line overrides as people type them, made into overrides that Hydra's grammar reads the way they were meant.

* ``+key=`` is ``key=`` when the key exists; ``key.sub=`` under a dictionary adds or replaces.
* A size may have a unit: ``hardware.dram_bytes=6GiB``, also in the comma list of a sweep.
* Text and paths need no second pair of quotes: spaces, ``=``, quotes and brackets mean themselves. Under ``--multirun``
  a comma outside quotes separates the values of a sweep; without it a comma is part of the text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.planner.common.command.known_keys import Key, sections_of, unknown_key
from penstock.planner.common.errors import UserError, nearest
from penstock.planner.common.measures import parse_bytes

_SWEEP_FUNCTION = re.compile(r"^\s*(choice|range|interval|glob|shuffle|sort|tag)\s*\(")
_QUOTED = re.compile(r"""^(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")$""", re.DOTALL)
_COMMA_LIST = re.compile(r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^,])+|(?<=,)(?=,|$)""", re.DOTALL)
_FRACTION = re.compile(r"^\s*[+-]?\d*\.\d*[1-9]\d*\s*$")
_MOST_DIGITS = 60
_ENDLESS = re.compile(rf"[\d_]{{{_MOST_DIGITS + 1}}}")
"""A number that neither a float nor a line holds."""
_OF_MODELS = ("model.checkpoint", "checkpoint")
"""Keys that a directory, or a name on the hub, may be meant for; the first one that a verb has is."""
_GROUP_OPTION = re.compile(r"^[\w.+/-]+$")


@dataclass(frozen=True)
class Grammar:
    """What one verb accepts: its keys, and its config groups with their options."""

    keys: Mapping[str, Key]
    groups: Mapping[str, Sequence[str]]
    multirun: bool
    absent: Callable[[str, str], str | None] = lambda group, option: None
    """(group, option) -> the remedy for an option that could exist here but does not, or None."""
    besides: Mapping[str, str] = field(default_factory=dict)
    """Group -> what serves where no option of it does."""


def key_of(override: str) -> str:
    """The key that ``override`` sets, without its prefix."""
    return override.partition("=")[0].strip().lstrip("+~")


def quote(text: str, literal: bool = False) -> str:
    """``text`` as one quoted value of Hydra's grammar; ``literal`` also keeps ``${...}`` from being interpolated."""
    if literal:
        text = re.sub(r"(\\*)\$\{", lambda m: m.group(1) * 2 + r"\${", text)
    text = re.sub(r"(\\*)(')", lambda m: m.group(1) * 2 + r"\'", text)
    return "'" + re.sub(r"(\\+)$", lambda m: m.group(1) * 2, text) + "'"


def normalise(override: str, grammar: Grammar) -> str:
    """The override that Hydra should see for ``override``. Raises UserError when nothing can be meant by it."""
    key, equals, value = override.partition("=")
    key = key.strip()
    path = key.lstrip("+")
    if path.startswith(("hydra.", "hydra/")):
        return override
    if key.startswith("~"):
        raise UserError(f"{override}: keys cannot be removed; set one with key=value, or to nothing with key=null")
    if not equals:
        raise UserError(f"{override}: expected key=value{_meant(override, grammar)}")
    if path in grammar.groups:
        return f"{path}={_check_group(path, value, grammar)}"
    if path in grammar.keys:
        added = "++" if grammar.keys[path].names_its_own and value.lstrip().startswith("{") else ""  # names that the profile lacks, too
        return f"{added}{path}={_value(grammar.keys[path], value, grammar.multirun)}"
    if path in sections_of(grammar.keys):
        return f"{path}={value}"
    holder = path.rpartition(".")[0]
    if holder in grammar.keys and grammar.keys[holder].is_dict:
        return f"++{path}={value}"
    raise UserError(f"{override}: {unknown_key(path, [*grammar.keys, *grammar.groups])}")


def _meant(word: str, grammar: Grammar) -> str:
    for group, options in grammar.groups.items():
        if word in options:
            return f"; did you mean {group}={word}?"
    if word in (*grammar.keys, *grammar.groups):
        return f", such as {word}=..."
    if word.endswith((".yaml", ".yml")) and "plan" in grammar.keys:
        return f"; did you mean plan={word}?"
    if "/" in word or os.path.isdir(word):
        return next((f"; did you mean {key}={word}?" for key in _OF_MODELS if key in grammar.keys), "")
    return nearest(word, [*grammar.keys, *grammar.groups])


def _check_group(group: str, value: str, grammar: Grammar) -> str:
    if _SWEEP_FUNCTION.match(value) and grammar.multirun:
        return value
    names = [unquoted(part.strip()) for part in (split_commas(value) if grammar.multirun else [value])]
    for name in names:
        if name in grammar.groups[group] or name == "null":
            continue
        remedy = grammar.absent(group, name)
        if remedy:
            raise UserError(f"{group}={name}: {remedy}")
        if "," in name and not grammar.multirun:
            raise UserError(f"{group}={name}: one {group} a run; add --multirun to try several")
        choices, other = ", ".join(grammar.groups[group]), grammar.besides.get(group)
        besides = f", or {other}" if other else ""
        raise UserError(f"{group}={name}: no such {group}; choose one of {choices}{besides}{nearest(name, grammar.groups[group])}")
    return ",".join(name if _GROUP_OPTION.match(name) else quote(name) for name in names)


def _value(key: Key, value: str, multirun: bool) -> str:
    if multirun and _SWEEP_FUNCTION.match(value):
        return value
    if key.is_size or key.is_text:
        parts = split_commas(value) if multirun else [value]
        return ",".join(_size(key, part) if key.is_size else _text(key, part) for part in parts)
    if key.is_whole and not multirun and _FRACTION.match(value):
        raise UserError(f"{key.path}={value}: must be {key.allowed}")
    if key.kind in (int, float) and _ENDLESS.search(value):
        raise UserError(f"{key.path}={value}: must be {key.allowed}, of at most {_MOST_DIGITS} digits")
    if key.is_number_list and not multirun and not value.lstrip().startswith("["):
        return f"[{value}]"
    if key.is_text_list and not value.lstrip().startswith("["):
        return f"[{_text(key, value)}]"
    return value


def _size(key: Key, value: str) -> str:
    plain = unquoted(value.strip())
    if plain in ("null", "") or plain.startswith("${") or plain.lstrip("+-").isdigit():
        return plain
    size = parse_bytes(plain)
    if size is None:
        raise UserError(f"{key.path}={value}: must be {key.allowed}")
    return str(size)


def _text(key: Key, value: str) -> str:
    if key.is_text and not key.literal and key.default != "" and not unquoted(value.strip()):
        raise UserError(f"{key.path}=: is empty; give {key.allowed}, or leave the key out")
    if _QUOTED.match(value) or (value == "null" and key.optional and not key.literal):
        return value
    return quote(value, key.literal)


def split_commas(value: str) -> list[str]:
    """``value`` cut at the commas that stand outside quotes."""
    return _COMMA_LIST.findall(value) or [value]


def unquoted(value: str) -> str:
    """``value`` without the quotes around it, if there are any."""
    return value[1:-1] if _QUOTED.match(value) else value
