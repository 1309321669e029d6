"""`--help` of every verb of both programs: one worked example each, that the verb accepts."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import pytest

from penstock.planner.common.command.help_page import print_help
from penstock.planner.common.command.overrides import normalise
from penstock.planner.common.command.verb import Verb, grammar_of, spelled_out
from tests.cli import command

VERBS = [(name, verb) for name in ("planner", "runtime") for verb in importlib.import_module(f"{name}.cli").PROGRAM.verbs]
IDS = [f"{name}-{verb.name}" for name, verb in VERBS]


@pytest.mark.parametrize(("program", "verb"), VERBS, ids=IDS)
def test_the_example_of_a_verb_is_one_that_it_accepts(program: str, verb: Verb) -> None:
    words = shlex.split(verb.example)
    assert words[:2] == [program, verb.name]
    grammar = grammar_of(verb, multirun=False)
    for override in spelled_out(words[2:], verb.words):
        assert normalise(override, grammar)
    typed = {word.partition("=")[0] for word in spelled_out(words[2:], verb.words)}
    assert not verb.words or set(verb.words) <= typed, "bare words stand for keys, so the example shows them"


@pytest.mark.parametrize(("program", "verb"), VERBS, ids=IDS)
def test_a_verb_has_a_line_that_says_what_it_does(program: str, verb: Verb) -> None:
    assert len(verb.summary.split()) > 5 and verb.summary[0].islower() and not verb.summary.endswith(".")
    assert set(verb.words) <= set(grammar_of(verb, multirun=False).keys)


@pytest.mark.parametrize(("program", "verb"), VERBS, ids=IDS)
def test_help_begins_with_at_most_ten_keys_and_tells_of_each_key_once(program: str, verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    grammar = grammar_of(verb, multirun=False)
    assert len(set(verb.used)) == len(verb.used) <= 10 and set(verb.used) <= {*grammar.keys, *grammar.groups}
    assert verb.used or len(grammar.keys) <= 10, "a page of keys wants a beginning"
    print_help(program, verb.name, "", verb.example, verb.used, grammar)
    heads = [line.split()[0] for line in capsys.readouterr().out.splitlines()[4:] if line[:2] == "  " and line[2:3].strip()]
    told = [head.rstrip("=") for head in heads if not head.startswith("--")]
    assert told[: len(verb.used)] == list(verb.used) and sorted(told) == sorted({*grammar.keys, *grammar.groups})
    assert "notes" not in grammar.keys


@pytest.mark.parametrize(("program", "verb"), VERBS, ids=IDS)
def test_help_shows_the_example_in_a_line_of_its_own_without_colours(program: str, verb: Verb, tmp_path: Path) -> None:
    result = command(program, verb.name, "--help", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{program} {verb.name}: ") and f"  {verb.example}" in lines and "\x1b" not in result.stdout
    assert list(tmp_path.iterdir()) == []
