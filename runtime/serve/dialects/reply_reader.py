"""A reply as it comes: what is said, what is reasoned, what is called."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from penstock.runtime.asked.reasoning import KEYS, Splitter
from penstock.runtime.serve.dialects.call_formats import calls_of


@dataclass(frozen=True)
class Said:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoned:
    """More of what comes before the answer."""

    text: str


@dataclass(frozen=True)
class Called:
    """A function to be called, whole."""

    number: int
    """From 0 on in one reply."""
    name: str
    arguments: str
    """An object, as JSON."""


Part = Said | Reasoned | Called


class ReplyReader:
    """Takes a reply's text with its marks. ``splitter`` sets reasoning apart, then ``parser`` calls; either may be None, and a parser of
    the checkpoint's own does both. What reads as a call but is none is text."""

    def __init__(self, splitter: Splitter | None, parser: ResponseParser | None, several: bool):
        self._splitter, self._parser, self._several = splitter, parser, several
        self._reasoned = _Trimmed()
        self._said = _Trimmed(leading=False)
        self._raw = ""
        """Of a call that has begun."""
        self.calls = 0

    @property
    def called(self) -> bool:
        """Whether any function is to be called."""
        return self.calls > 0

    def add(self, text: str) -> list[Part]:
        """What ``text`` adds."""
        pieces = [(text, False)] if self._splitter is None else [(p.text, p.reasoning) for p in self._splitter.add(text)]
        return [part for said, reasoning in pieces for part in self._piece(said, reasoning)]

    def rest(self) -> list[Part]:
        """What is left when the reply has ended."""
        pieces = [] if self._splitter is None else [(p.text, p.reasoning) for p in self._splitter.rest()]
        parts = [part for said, reasoning in pieces for part in self._piece(said, reasoning)]
        if self._parser is not None:
            parser, self._parser = self._parser, None
            try:
                parts += self._read(parser.finalize()[1])
            except (ValueError, KeyError):  # a template's own words for a region that does not read as it should
                parts += self._given_up()
        return parts

    def _piece(self, text: str, reasoning: bool) -> Iterable[Part]:
        if reasoning:
            return self._reason(text)
        if self._parser is None:
            return self._say(text)
        try:
            return list(self._read(self._parser.feed(text)))
        except (ValueError, KeyError):
            self._raw += text
            self._parser = None
            return self._given_up()

    def _read(self, events: Sequence[Mapping[str, Any]]) -> Iterable[Part]:
        for event in events:
            kind, field = event["type"], event["field"]
            if field == "tool_calls":
                if kind == "region_chunk":
                    self._raw += event["text"]
                elif kind == "region_close":
                    yield from self._call(event["value"])
            elif kind == "region_chunk":
                yield from self._reason(event["text"]) if field in KEYS else self._say(event["text"]) if field == "content" else ()

    def _call(self, value: Any) -> Iterable[Part]:
        calls = calls_of(value)
        if calls is None:
            yield from self._given_up()
            return
        self._raw = ""
        for name, arguments in calls:
            if self._several or not self.calls:
                yield Called(self.calls, name, json.dumps(arguments, ensure_ascii=False))
                self.calls += 1

    def _given_up(self) -> list[Part]:
        raw, self._raw = self._raw, ""
        return list(self._say(raw))

    def _reason(self, text: str) -> Iterable[Part]:
        self._said.leading = True
        if kept := self._reasoned.add(text):
            yield Reasoned(kept)

    def _say(self, text: str) -> Iterable[Part]:
        if kept := self._said.lead(text):
            yield Said(kept)


class _Trimmed:
    """Text without the newlines before and behind it, where ``leading``; those inside stay."""

    def __init__(self, leading: bool = True):
        self.leading, self._held = leading, ""

    def lead(self, text: str) -> str:
        """``text`` without what leads."""
        kept = text.lstrip("\n") if self.leading else text
        self.leading = self.leading and not kept
        return kept

    def add(self, text: str) -> str:
        """The same, with newlines at the end held back until more comes."""
        text = self._held + self.lead(text)
        kept = text.rstrip("\n")
        self._held = text[len(kept) :]
        return kept
