"""`VERB --help`: what it does, a worked example, the keys that people use, the presets and every other key."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from penstock.planner.common.command.known_keys import Key
from penstock.planner.common.command.overrides import Grammar

NOTES_AT = 43
"""The column where a key's meaning begins."""


def print_help(program: str, verb: str, text: str, example: str, used: Sequence[str], grammar: Grammar) -> None:
    """Print the help of one verb on stdout; ``used`` are the keys and groups to begin with."""
    width = min(shutil.get_terminal_size().columns, 120)
    print(f"{program} {verb}: {text}\n\n  {example}\n")
    if used:
        print("Used most (key=value; a size may be written 6GiB)")
        for path in used:
            if path in grammar.groups:
                _row(f"  {path}", f"A preset: {', '.join(grammar.groups[path])}.", width)
            else:
                _key(grammar.keys[path], width)
        print()
    presets = {group: options for group, options in grammar.groups.items() if group not in used}
    if presets:
        print("Presets")
        for group, options in presets.items():
            print(textwrap.fill(f"{', '.join(options)}", width, initial_indent=f"  {group + '=':<10} ", subsequent_indent=" " * 13))
        print()
    print("Other keys" if used else "Keys (key=value; a size may be written 6GiB)")
    for key in sorted(grammar.keys.values(), key=lambda key: "." in key.path):
        if key.path not in used:
            _key(key, width)
    print("\nFlags\n  --multirun   every combination of comma lists, into sweeps/N/ (docs/sweeps.md)")
    print("  --cfg job    show the configuration and stop")


def _key(key: Key, width: int) -> None:
    default = f" = {key.shown_default}" if key.shown_default not in ("???", "{}", "[]", "") else ""
    choices = f"({'|'.join(key.choices)})" if key.choices and key.kind is not bool else ""
    _row(f"  {key.path}{default}", f"{key.doc} {choices}".strip(), width)


def _row(head: str, note: str, width: int) -> None:
    if len(head) > NOTES_AT - 3:
        print(head)
        head = ""
    first, *rest = textwrap.wrap(note, max(30, width - NOTES_AT)) or [""]
    print(f"{head:<{NOTES_AT - 2}}  {first}".rstrip())
    for line in rest:
        print(" " * NOTES_AT + line)
