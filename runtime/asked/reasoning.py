"""What a model says to itself before it answers: how a reply marks it, and a reply without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.runtime.asked.prompts import Vocabulary

PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought\n", "<channel|>"),
)
"""Marks around reasoning: of Qwen, DeepSeek, GLM, MiniMax and others; of Magistral; of Seed-OSS; of Gemma 4."""
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
"""Of gpt-oss, whose replies are messages in channels: what is in ``final`` is the answer."""
KEYS = ("reasoning_content", "thinking", "reasoning")
"""Under one of which a template reads a message's reasoning."""


@dataclass(frozen=True)
class Piece:
    """Of a reply."""

    text: str
    reasoning: bool = False


class Splitter(Protocol):
    """Takes a reply bit by bit, with its marks. What may be the beginning of a mark is kept back until more is there."""

    def add(self, text: str) -> Iterator[Piece]: ...

    def rest(self) -> Iterator[Piece]:
        """What is kept back when the reply has ended."""


@dataclass(frozen=True)
class Reasoning:
    """How replies mark what is reasoned, by their tokenizer and its template."""

    key: str
    """Under which the template reads a message's reasoning."""
    splitter: Callable[[str], Splitter]
    """For a reply, from the prompt that it answers."""
    decode: Callable[[list[int]], str]
    """Text in which the marks stand, and no other special token."""
    marks: tuple[str, ...]
    """One of :data:`PAIRS`, or :data:`HARMONY`."""

    def message(self, prompt: str, reply: list[int]) -> dict[str, str]:
        """The whole ``reply`` to ``prompt`` as a template takes it back: ``content``, and under ``key`` what was reasoned."""
        splitter = self.splitter(prompt)
        pieces = [*splitter.add(self.decode(reply)), *splitter.rest()]
        content, reasoned = ("".join(p.text for p in pieces if p.reasoning is kind).strip("\n") for kind in (False, True))
        return {"content": content} | ({self.key: reasoned} if reasoned else {})


def find_reasoning(vocabulary: Vocabulary) -> Reasoning | None:
    """None where neither the tokenizer's chat template nor its added tokens have marks of reasoning."""
    tokenizer = vocabulary.tokenizer
    said: str | Mapping[str, Any] | None = getattr(tokenizer, "chat_template", None)
    if tokenizer is None or not said:
        return None
    template = said if isinstance(said, str) else " ".join(map(str, said.values()))
    known = " ".join([template, *map(str, tokenizer.get_added_vocab())])

    def reasoning(marks: tuple[str, ...], splitter: Callable[[str], Splitter]) -> Reasoning:
        key = next((key for key in KEYS if re.search(rf"[.'\"]{key}\b", template)), KEYS[0])
        specials = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        hidden = {number for number, token in specials if not any(token in mark for mark in marks)}
        return Reasoning(key, splitter, lambda ids: vocabulary.marked_text([token for token in ids if token not in hidden]), marks)

    if "<|channel|>" in known and "<|message|>" in known:
        return reasoning(HARMONY, lambda _: InChannels())
    for begins, ends in PAIRS:
        if ends in known:
            return reasoning(
                (begins, ends),
                lambda prompt, b=begins, e=ends: BetweenMarks(b, e, prompt.rstrip().endswith(b.rstrip())),  # type: ignore[misc]
            )
    return None


class BetweenMarks:
    """Reasoning comes first, from ``begins`` to ``ends``; where ``inside``, the prompt has begun it. Later marks are plain text."""

    def __init__(self, begins: str, ends: str, inside: bool):
        self._begins, self._ends = begins, ends
        self._inside, self._answers, self._kept = inside, False, ""

    def add(self, text: str) -> Iterator[Piece]:
        self._kept += text
        if not self._inside and not self._answers:
            bare = self._kept.lstrip()
            if self._begins.startswith(bare) and bare != self._begins:
                return
            self._inside = bare.startswith(self._begins)
            self._answers = not self._inside
            self._kept = bare.removeprefix(self._begins) if self._inside else self._kept
        if self._inside and self._ends in self._kept:
            reasoned, _, self._kept = self._kept.partition(self._ends)
            yield from _piece(reasoned, True)
            self._inside, self._answers = False, True
        keep = _begun(self._kept, self._ends) if self._inside else 0
        told, self._kept = self._kept[: len(self._kept) - keep], self._kept[len(self._kept) - keep :]
        yield from _piece(told, self._inside)

    def rest(self) -> Iterator[Piece]:
        told, self._kept = self._kept, ""
        yield from _piece(told, self._inside)


class InChannels:
    """gpt-oss's messages: a header up to ``<|message|>``, which is no text, and a text up to the next mark. What has no header is an
    answer."""

    _MARK = re.compile("|".join(map(re.escape, HARMONY)))

    def __init__(self) -> None:
        self._kept, self._header, self._channel = "", "", "final"

    def add(self, text: str) -> Iterator[Piece]:
        self._kept += text
        while (mark := self._MARK.search(self._kept)) is not None:
            before, self._kept = self._kept[: mark.start()], self._kept[mark.end() :]
            if not self._header:
                yield from self._piece(before)
            elif mark[0] == "<|message|>":
                self._channel = (before.split() or ["final"])[0] if self._header == "<|channel|>" else "final"
            self._header = mark[0] if mark[0] in ("<|start|>", "<|channel|>") else ""
        if not self._header:
            keep = max(_begun(self._kept, mark) for mark in HARMONY)
            told, self._kept = self._kept[: len(self._kept) - keep], self._kept[len(self._kept) - keep :]
            yield from self._piece(told)

    def rest(self) -> Iterator[Piece]:
        told, self._kept = "" if self._header else self._kept, ""
        yield from self._piece(told)

    def _piece(self, text: str) -> Iterator[Piece]:
        return _piece(text, self._channel != "final")


def _piece(text: str, reasoning: bool) -> Iterator[Piece]:
    if text:
        yield Piece(text, reasoning)


def _begun(text: str, mark: str) -> int:
    """Characters at the end of ``text`` that begin ``mark``."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
