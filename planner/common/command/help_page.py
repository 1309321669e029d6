"""`VERB --help`: what it does, a worked example, the presets and every key."""

from __future__ import annotations

import shutil
import textwrap

from penstock.planner.common.command.overrides import Grammar


def print_help(program: str, verb: str, text: str, example: str, schema: type, grammar: Grammar) -> None:
    """Print the help of one verb on stdout."""
    width = min(shutil.get_terminal_size().columns, 120)
    print(f"{program} {verb}: {text}\n\n  {example}\n")
    if grammar.groups:
        print("Presets")
        for group, options in grammar.groups.items():
            print(textwrap.fill(f"{', '.join(options)}", width, initial_indent=f"  {group + '=':<10} ", subsequent_indent=" " * 13))
        print()
    print("Keys (key=value; a size may be written 6GiB)")
    own_first = sorted(grammar.keys.items(), key=lambda pair: "." in pair[0])
    for path, key in own_first:
        head = f"  {path}" + (f" = {key.shown_default}" if key.shown_default not in ("???", "{}", "[]", "") else "")
        choices = f"({'|'.join(key.choices)})" if key.choices and key.kind is not bool else ""
        note = f"{key.doc} {choices}".strip()
        if len(head) > 40:
            print(head)
            head = ""
        lines = textwrap.wrap(note, max(30, width - 43)) or [""]
        print(f"{head:<41}  {lines[0]}".rstrip())
        for line in lines[1:]:
            print(" " * 43 + line)
    print("\nFlags\n  --multirun   every combination of comma lists, into sweeps/N/ (docs/sweeps.md)")
    print("  --cfg job    show the configuration and stop")
