"""Tokens that steer a model, which only its template may write: in what a client says they stay text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.runtime.asked.prompts import text_ids
from penstock.runtime.serve.dialects.wrong_request import WrongRequest

_BEGINS, _ENDS = "\ufdd0", "\ufdd1"
"""Around a control token that a client wrote. Unicode calls both noncharacters: no text has them."""


class ControlTokens:
    """The special tokens of ``tokenizer``, and those of its added ones that ``template`` writes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str):
        self._tokenizer = tokenizer
        added = [(token.content, token.special) for token in tokenizer.added_tokens_decoder.values()]
        names = {name for name, special in added if len(name) > 1 and not name.isspace() and (special or name in template)}
        longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        self._any = re.compile(longest_first or "(?!)")
        self._marked = re.compile(f"{_BEGINS}({longest_first or '(?!)'}){_ENDS}|[{_BEGINS}{_ENDS}]")
        self._newline = self._encoded("\n")

    def mark(self, value: Any) -> Any:
        """``value``, of JSON's types, with each control token in its strings marked. WrongRequest where a key holds one."""
        if isinstance(value, str):
            bare = value.replace(_BEGINS, "").replace(_ENDS, "")
            return self._any.sub(f"{_BEGINS}\\g<0>{_ENDS}", bare)
        if isinstance(value, Mapping):
            for key in value:
                if found := self._any.search(str(key)):
                    raise WrongRequest(f"a key holds the control token {found[0]!r}; rename it")
            return {key: self.mark(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.mark(inner) for inner in value]
        return value

    def text(self, marked: str) -> str:
        """``marked`` without the marks."""
        return marked.replace(_BEGINS, "").replace(_ENDS, "")

    def ids(self, marked: str, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a rendered prompt. What is marked is cut in two, and each part is read alone, so no control token comes of it.
        LongText where a part has more than ``most`` tokens."""
        first, *others = self._parts(marked)
        ids = self._encoded(first, most)
        for part in others:
            ids += self._within(part, most)
        return tuple(ids)

    def plain_ids(self, text: str, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a client's ``text``, in which nothing is a control token. LongText as :meth:`ids`."""
        return self.ids(self.mark(text), most)

    def _parts(self, marked: str) -> list[str]:
        parts, at = [""], 0
        for found in self._marked.finditer(marked):
            parts[-1] += marked[at : found.start()]
            # A mark alone is what a template left of one: text on either side of it must not join into a token, either.
            cut = self._cut(found[1]) if found[1] else ("", "")
            parts[-1] += cut[0]
            parts += [cut[1], ""]
            at = found.end()
        parts[-1] += marked[at:]
        return [parts[0], *filter(None, parts[1:])]

    def _cut(self, token: str) -> tuple[str, str]:
        for at in range(1, len(token)):
            if not self._any.search(token[:at]) and not self._any.search(token[at:]):
                return token[:at], token[at:]
        raise WrongRequest(
            f"the text holds {token!r}, which this model's tokenizer reads as a control token however it is cut; leave it out"
        )

    def _encoded(self, text: str, most: int | None = None) -> list[int]:
        return text_ids(self._tokenizer, text, False, most) if text else []

    def _within(self, text: str, most: int | None) -> list[int]:
        """As it is read inside a text: SentencePiece begins a text with a space that is not there."""
        ids = self._encoded("\n" + text, most if most is None else most + len(self._newline))
        return ids[len(self._newline) :] if ids[: len(self._newline)] == self._newline else self._encoded(text, most)
