"""Grammars that a reply keeps to, in llguidance's Lark."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from llguidance import LLMatcher
from transformers import PreTrainedTokenizerBase

from penstock.runtime.serve.dialects.wrong_request import WrongRequest

BLANKS = r"[ \n\t\r]{0,64}"
"""Between JSON's tokens, and before a reply. It is bounded: a reply must not be able to go on with blanks for ever."""
_OWN_LINE = re.compile(r" *\d+ \| ")
"""A line of the grammar, as llguidance shows where it is wrong."""


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

    def number(self, name: str) -> int | None:
        """Of an added token."""
        return self._added.get(name, (None, False))[0]

    def free(self, rule: str, mark: str, but: Collection[int | None]) -> list[str]:
        """Lines that define ``rule`` as any text that does not hold ``mark``, and ``rule``_through as the same up to ``mark``, and with it.
        Between texts may stand every added token ``but`` these, and but ``mark``."""
        number, special = self._added.get(mark, (None, False))
        text, anything = rule.upper(), r"/(.|\n)*/"
        without = "" if special else f" & ~({anything} {self.plain(mark)} {anything})"
        ways = {} if special else {f"{rule}_text": f"[lazy]: {anything} {self.plain(mark)}"}
        closing = [*ways, *([] if number is None else [f"<[{number}]>"])]
        others = ",".join(str(found) for name, (found, _) in self._added.items() if name != mark and found not in but)
        return [
            f"{rule}: ({text}{f' | <[{others}]>' if others else ''})*",
            f"{text}: /(.|\\n)+/{without}",
            f"{rule}_through: {rule} ({' | '.join(closing)})",
            *(name + way for name, way in ways.items()),
        ]

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


def calling_grammar(
    marks: Marks, opens: str, call: str, several: bool, reasoning: tuple[str, str] | None, begun: bool, ends: Collection[int]
) -> str:
    """Any reply, in which ``opens`` begins a call: behind it comes ``call``, the right side of a rule. What is reasoned, between the two
    marks of ``reasoning``, is free; where ``begun``, the prompt has opened it. ``ends`` are the tokens that end a reply. At each place a
    token belongs to one rule alone, since llguidance follows but one."""
    opened = None if reasoning is None else marks.number(reasoning[0])
    lines = ["%llguidance {}", *marks.free("said", opens, {*ends, opened}), f"call: {call}"]
    if reasoning is None or (opened is None and not begun):
        lines.append(f"start: (said_through call){'*' if several else '?'} said")
        return LLMatcher.grammar_from_lark("\n".join(lines) + "\n")
    lines += marks.free("thought", reasoning[1], ends)
    reasons = "" if opened is None else f"(said <[{opened}]> thought_through)*"
    left = "" if opened is None else f"(<[{opened}]> thought)?"
    start = f"start: {'thought | thought_through body' if begun else 'body'}"
    once = f"{reasons} (said_through call {reasons}){'*' if several else '?'}"
    return LLMatcher.grammar_from_lark("\n".join([*lines, f"body: {once} said {left}", start]) + "\n")


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
    """In one line, what comes before the grammar itself; nothing where there is none."""
    wrong, said = LLMatcher.validate_grammar_with_warnings(grammar)
    if not wrong:
        return ""
    lines = itertools.takewhile(lambda line: not _OWN_LINE.match(line), said[0].splitlines())
    words = [line.strip() for line in lines if line.strip(" ^")]  # a pattern is quoted, with marks below what is wrong
    return " ".join(words).rpartition("JSON schema: ")[2][:500]


def _words(schema: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(schema, Mapping):
        for key, inner in schema.items():
            yield key, inner
            yield from _words(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _words(inner)
