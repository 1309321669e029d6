"""What may follow on a command line: the answers to a shell's completion request."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from penstock.planner.common.command.known_keys import Key
from penstock.planner.common.command.overrides import Grammar

FLAGS = ("--help", "--multirun", "--cfg")


def complete_word(word: str, grammar: Grammar, bare: Sequence[str] = ()) -> list[str]:
    """Every completion of ``word``: flags, groups with ``=``, keys up to their next dot, a key's choices, files for text. The values of
    the keys ``bare`` may stand alone."""
    if word.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(word)]
    key, equals, value = word.partition("=")
    if not equals:
        names = [f"{group}=" for group in grammar.groups] + [_up_to_dot(path, len(word)) for path in grammar.keys]
        names += [value for key in bare for value in _values(grammar.keys[key], word)]
        return sorted({name for name in names if name.startswith(word)})
    known = grammar.keys.get(key.lstrip("+"))
    choices = grammar.groups.get(key) or (known.choices if known else ())
    if not choices and known is not None:
        choices = _values(known, value)
    return [f"{key}={choice}" for choice in choices if choice.startswith(value)]


def _values(key: Key, begun: str) -> Sequence[str]:
    """A key's choices, or the files whose names begin so where it is text."""
    if key.choices or not key.is_text:
        return key.choices
    return [path + "/" * os.path.isdir(path) for path in sorted(glob.glob(glob.escape(begun) + "*"))]


def _up_to_dot(path: str, start: int) -> str:
    end = path.find(".", start)
    return path + "=" if end < 0 else path[: end + 1]
