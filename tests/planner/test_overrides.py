"""Overrides reach the configuration as they were typed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from penstock.planner.common.command.known_keys import keys_of
from penstock.planner.common.command.overrides import Grammar, normalise, quote
from penstock.planner.common.errors import UserError, nearest


@dataclass
class Inner:
    room_bytes: int = 0
    extra: dict[str, str] = field(default_factory=dict)


@dataclass
class Schema:
    path: str = ""
    maybe: str | None = None
    out: str = "plan.yaml"
    words: list[str] = field(default_factory=list)
    prompt: str = field(default="", metadata={"literal": True})
    count: int = 0
    inner: Inner = field(default_factory=Inner)


def grammar(multirun: bool = False) -> Grammar:
    return Grammar(keys_of(Schema), {"colour": ("red", "blue")}, multirun)


def value_of(override: str) -> object:
    return OverridesParser.create().parse_override(override).value()


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"])))
def test_any_prompt_survives_quoting(text: str) -> None:
    value = value_of("prompt=" + quote(text, literal=True))
    assert OmegaConf.create({"prompt": value}).prompt == text


@pytest.mark.parametrize("text", ["a b", "a=b", "it's", '"half', "[x", "{y}", "x,y", "#", "a\\", "a\\'", "tab\there", "(z)"])
def test_a_path_means_itself(text: str) -> None:
    assert value_of(normalise(f"path={text}", grammar())) == text


@pytest.mark.parametrize("text", ["'a b'", '"a b"'])
def test_a_quoted_path_stays_as_quoted(text: str) -> None:
    assert value_of(normalise(f"path={text}", grammar())) == "a b"


def test_null_is_null_only_where_nothing_is_allowed() -> None:
    assert value_of(normalise("maybe=null", grammar())) is None
    assert value_of(normalise("path=null", grammar())) == "null"


def test_a_single_text_makes_a_list_of_texts() -> None:
    assert value_of(normalise("words=###", grammar())) == ["###"]
    assert value_of(normalise("words=[a, b]", grammar())) == ["a", "b"]


def test_sizes_take_units_also_in_a_sweep() -> None:
    assert normalise("inner.room_bytes=6GiB", grammar()) == "inner.room_bytes=6442450944"
    assert normalise("inner.room_bytes=1kB, 2 MiB", grammar(multirun=True)) == "inner.room_bytes=1000,2097152"


def test_commas_in_text_sweep_only_in_a_multirun() -> None:
    assert normalise("path=a b,'c,d'", grammar(multirun=True)) == "path='a b','c,d'"
    assert value_of(normalise("path=a b,c", grammar())) == "a b,c"


def test_a_plus_before_a_known_key_is_ignored() -> None:
    assert normalise("+count=3", grammar()) == normalise("count=3", grammar()) == normalise("++count=3", grammar())


@pytest.mark.parametrize("empty", ["", "''", '""', " "])
def test_a_path_that_is_empty_is_refused(empty: str) -> None:
    with pytest.raises(UserError, match="^out=: is empty; give text, or leave the key out$"):
        normalise(f"out={empty}", grammar())


def test_a_dictionary_takes_new_entries() -> None:
    assert normalise("inner.extra.note=hello", grammar()) == "++inner.extra.note=hello"
    assert normalise("inner.extra={note: hello}", grammar()) == "++inner.extra={note: hello}"
    assert normalise("inner.extra=hello", grammar()) == "inner.extra=hello", "which is no dictionary"


@pytest.mark.parametrize(
    "override", ["cuont=3", "inner.roombytes=1", "colour=rde", "colour=red,blue", "lone", "~count", "inner.room_bytes=x"]
)
def test_what_cannot_be_meant_is_refused(override: str) -> None:
    with pytest.raises(UserError, match="did you mean|--multirun|key=value|null|size"):
        normalise(override, grammar())


@pytest.mark.parametrize(
    ("word", "allowed", "meant"),
    [
        ("slove", ("probe", "solve"), "solve"),
        ("FP9", ("FP8", "MXFP4"), "FP8"),
        ("temp", ("top_p", "temperature"), "temperature"),
        ("workload.bach", ("workload.requests", "workload.batch"), "workload.batch"),
        ("nosuch", ("source", "notes", "host", "out"), ""),
        ("workload.nosuch", ("workload", "workload.source", "workload.notes"), ""),
        ("te", ("temperature",), ""),
        ("a", (), ""),
    ],
)
def test_what_was_meant_is_guessed_only_where_it_is_alike(word: str, allowed: tuple[str, ...], meant: str) -> None:
    assert nearest(word, allowed) == (f"; did you mean {meant}?" if meant else "")
