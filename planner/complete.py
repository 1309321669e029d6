"""What may follow on a command line: the answers to a shell's completion request."""

from __future__ import annotations

import glob
import os

from planner.overrides import Grammar

FLAGS = ("--help", "--multirun", "--cfg")


def complete_word(word: str, grammar: Grammar, bare: str | None = None) -> list[str]:
    """Every completion of ``word``: flags, groups with ``=``, keys up to their next dot, a key's choices, files for text. The choices of
    the key ``bare`` may stand alone."""
    if word.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(word)]
    key, equals, value = word.partition("=")
    if not equals:
        names = [f"{group}=" for group in grammar.groups] + [_up_to_dot(path, len(word)) for path in grammar.keys]
        names += grammar.keys[bare].choices if bare else ()
        return sorted({name for name in names if name.startswith(word)})
    known = grammar.keys.get(key.lstrip("+"))
    choices = grammar.groups.get(key) or (known.choices if known else ())
    if not choices and known is not None and known.is_text:
        choices = [path + "/" * os.path.isdir(path) for path in sorted(glob.glob(glob.escape(value) + "*"))]
    return [f"{key}={choice}" for choice in choices if choice.startswith(value)]


def _up_to_dot(path: str, start: int) -> str:
    end = path.find(".", start)
    return path + "=" if end < 0 else path[: end + 1]
