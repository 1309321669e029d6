"""Grammars that a reply keeps to, in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import LLMatcher
from transformers import PreTrainedTokenizerBase

from penstock.runtime.serve.dialects.wrong_request import WrongRequest

BLANKS = r"[ \n\t\r]{0,64}"
"""Between JSON's tokens, and before a reply. It is bounded: a reply must not be able to go on with blanks for ever."""


class Marks:
    """Text of a grammar in which a tokenizer's added tokens may be these tokens. Special ones match no text, so they must be."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
        self._added = {name: said for name, said in added.items() if not name.isspace()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @staticmethod
    def plain(text: str) -> str:
        """``text`` without special tokens, as a literal."""
        return json.dumps(text)

    def text(self, text: str) -> str:
        """``text`` as a sequence of literals and tokens; nothing for no text."""
        parts, at = [], 0
        for found in self._any.finditer(text):
            parts += [self.plain(text[at : found.start()])] * (found.start() > at) + [self._token(found[0])]
            at = found.end()
        return " ".join(parts + [self.plain(text[at:])] * (at < len(text)))

    def through(self, rule: str, mark: str) -> list[str]:
        """Lines that define ``rule`` as any text up to ``mark``, and with it."""
        number, special = self._added.get(mark, (None, False))
        ways = {} if special else {f"{rule}_text": f"[lazy]: /(.|\\n)*/ {self.plain(mark)}"}
        if number is not None:
            ways[f"{rule}_token"] = f": /(.|\\n)*/ <[{number}]>"
        return [f"{rule}: {' | '.join(ways)}", *(name + way for name, way in ways.items())]

    def _token(self, name: str) -> str:
        number, special = self._added[name]
        return f"<[{number}]>" if special else f"({self.plain(name)} | <[{number}]>)"


def either(alternatives: Iterable[str]) -> str:
    """One of them, each of which may be several symbols."""
    return " | ".join(f"({one})" for one in alternatives)


def schema_rule(schema: Mapping[str, Any] | bool) -> str:
    """What keeps to a JSON ``schema``."""
    said = {} if schema is True else {"not": {}} if schema is False else dict(schema)
    return f"%json {json.dumps({**said, 'x-guidance': {'whitespace_pattern': BLANKS}})}"


def reply_grammar(marks: Marks, body: str, reasoning: tuple[str, str, str] | None, begun: bool) -> str:
    """The whole reply: ``body``, the right side of a rule. Before it may stand what is reasoned: ``reasoning`` is what opens it, what
    closes it, and what comes then. Where ``begun``, the prompt has opened it."""
    lines = ["%llguidance {}", f"body: {body}", f"BLANKS: /{BLANKS}/"]
    if reasoning is None:
        lines.append("start: body")
    else:
        opens, closes, then = reasoning
        lines += [*marks.through("thought", closes), f"opened: {marks.text(opens)} thought {marks.text(then)}"]
        lines.append("start: thought BLANKS body" if begun else "start: (opened BLANKS)? body")
    return LLMatcher.grammar_from_lark("\n".join(lines) + "\n")


def check_schema(schema: Mapping[str, Any] | bool, where: str) -> None:
    """WrongRequest naming ``where`` for what is no JSON Schema in ``schema``, or is not in it."""
    for word, inner in _words(schema):
        if word == "x-guidance":
            raise WrongRequest(f"{where}: 'x-guidance' is not JSON Schema; leave it out", where)
        if word == "$ref" and isinstance(inner, str) and not inner.startswith("#"):
            raise WrongRequest(f"{where}: $ref {inner!r} is outside the schema; only references that begin with '#' are followed", where)


def check_grammar(grammar: str, parts: Mapping[str, Mapping[str, Any] | bool]) -> None:
    """WrongRequest for what llguidance refuses, naming which of the schemas in ``parts`` it is."""
    if said := _refusal(grammar):
        for where, schema in parts.items():
            if own := _refusal(f"start: {schema_rule(schema)}\n"):
                raise WrongRequest(f"{where}: {own}", where)
        where = next(iter(parts))
        raise WrongRequest(f"{where}: {said}", where)


def _refusal(grammar: str) -> str:
    """Its first line, which is all that is not the grammar itself; nothing where there is none."""
    wrong, said = LLMatcher.validate_grammar_with_warnings(grammar)
    return said[0].splitlines()[0].rpartition("JSON schema: ")[2][:500] if wrong else ""


def _words(schema: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(schema, Mapping):
        for key, inner in schema.items():
            yield key, inner
            yield from _words(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _words(inner)
