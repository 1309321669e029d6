"""YAML from files that anyone may have edited: mappings, lists, text and numbers, and no more of them than such a file holds."""

from __future__ import annotations

from typing import Any

import yaml

MOST_NODES = 200_000
DEEPEST = 24
LONGEST_NUMBER = 40
"""Characters."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"


class YamlFlaw(Exception):
    """What is wrong with the text, and where, in words for one line."""


def load_strictly(text: bytes) -> Any:
    """The one document in ``text``: None, booleans, numbers, text, lists and mappings of text.

    Raises YamlFlaw for aliases, tags and keys that stand twice, for more than ``MOST_NODES`` nodes or ``DEEPEST`` levels, and for what is
    no YAML. Time and memory are linear in ``text``. Dates are text.
    """
    try:
        return _Reader(text).document()
    except yaml.MarkedYAMLError as error:
        raise YamlFlaw(f"not readable as YAML{_where(error.problem_mark)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise YamlFlaw("not readable as YAML") from error


def _where(mark: Any) -> str:
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""


class _Reader:
    """Values from the parser's events, one after the other."""

    def __init__(self, text: bytes):
        self._parser = _LOADER(text)
        self._nodes = 0

    def document(self) -> Any:
        self._next()
        if isinstance(self._next(), yaml.StreamEndEvent):
            return None
        value = self._value(self._next(), 0)
        self._next()
        end = self._next()
        if not isinstance(end, yaml.StreamEndEvent):
            raise self._flaw("a second document", end)
        return value

    def _next(self) -> Any:
        return self._parser.get_event()

    def _flaw(self, what: str, event: Any) -> YamlFlaw:
        return YamlFlaw(f"not readable as YAML{_where(event.start_mark)} ({what})")

    def _value(self, event: Any, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise self._flaw(f"more than {MOST_NODES} values", event)
        if depth > DEEPEST:
            raise self._flaw(f"more than {DEEPEST} levels", event)
        if isinstance(event, yaml.AliasEvent):
            raise self._flaw(f"an alias, *{str(event.anchor)[:20]}: write the value itself", event)
        if event.tag not in (None, "!"):
            raise self._flaw(f"a tag, {event.tag[:40]}: leave it out", event)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        return self._list(depth) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(depth)

    def _list(self, depth: int) -> list[Any]:
        found = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            found.append(self._value(event, depth + 1))
        return found

    def _mapping(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise self._flaw("a key that is no text", event)
            if event.value in found:
                raise self._flaw(f"the key {event.value[:40]} stands twice", event)
            found[event.value] = self._value(self._next(), depth + 1)
        return found

    def _scalar(self, event: Any) -> Any:
        node = yaml.ScalarNode("", event.value)
        kind = self._parser.resolve(yaml.ScalarNode, event.value, event.implicit).removeprefix(_TAG)
        if kind == "null":
            return None
        if kind == "bool":
            return self._parser.construct_yaml_bool(node)
        if kind not in ("int", "float"):
            return event.value
        try:
            if len(event.value) > LONGEST_NUMBER:
                raise ValueError
            return self._parser.construct_yaml_int(node) if kind == "int" else self._parser.construct_yaml_float(node)
        except (ValueError, OverflowError):
            raise self._flaw(f"no number: {event.value[:LONGEST_NUMBER]}", event) from None
