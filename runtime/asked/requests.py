"""What a run is asked for, as it was written: prompts in a text file, or requests in a file of JSON lines. Imports no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock.planner.common.errors import UserError, nearest
from penstock.planner.common.user_folder import user_path

SUFFIX = ".jsonl"
KEYS = ("prompt", "messages", "tokens", "max_new_tokens", "conversation")
_EXAMPLE = '{"prompt": "Once upon a time", "max_new_tokens": 64}'
_MESSAGES = '[{"role": "user", "content": "Hello"}]'
_SHOWN = 40
"""Characters of a wrong value that a message repeats."""


@dataclass(frozen=True)
class Asked:
    """One request, checked as far as it can be without a tokenizer."""

    where: str
    """The key, and of a file the line, that it came from."""
    prompt: str | tuple[int, ...]
    """Text, or token ids."""
    max_new_tokens: int
    conversation: str | None = None
    """Requests of one conversation are turns, in the order of the file."""
    said: bool = False
    """Whether a text is what a person says to a model that has a chat template; else it is continued."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """In place of a prompt: all that was said so far, for the chat template."""

    @property
    def known_tokens(self) -> int:
        """Of its own prompt, at least: a text counts as one."""
        return 1 if isinstance(self.prompt, str) else len(self.prompt)


def read_requests(prompts: str, vocab: int, capacity_tokens: int, new_tokens: int) -> list[Asked]:
    """The requests of the file ``prompts``, in its order: JSON lines when its name ends in .jsonl, else a prompt a line. Blank lines are
    left out. ``new_tokens`` is for those that do not say how many; a sequence's KV has ``capacity_tokens``. UserError naming file and line.
    """
    path = user_path(prompts)
    json_lines = path.suffix.lower() == SUFFIX
    form = f"one JSON object a line, such as {_EXAMPLE}" if json_lines else "a text file with one prompt a line"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"prompts={prompts}: cannot be read ({error.strerror}); give {form}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"prompts={prompts}: byte {error.start} is not UTF-8; give {form}, in UTF-8") from error
    # inside JSON a text may hold any of the other characters that splitlines takes for ends of a line
    lines = text.split("\n") if json_lines else text.splitlines()
    numbered = [(f"prompts={prompts}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"prompts={prompts}: no {'request' if json_lines else 'prompt'} in it; give {form}")
    if not json_lines:
        return [Asked(where, line, new_tokens, said=True) for where, line in numbered]
    return [_Line(where, line).request(vocab, capacity_tokens, new_tokens) for where, line in numbered]


def read_stdin(where: str) -> str:
    """All of standard input, without the ends of its last lines. UserError naming ``where``."""
    try:
        text = sys.stdin.buffer.read().decode("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError, AttributeError) as error:
        raise UserError(f"{where}: standard input cannot be read as UTF-8 ({error}); pipe some text in") from error
    if not text:
        raise UserError(f"{where}: standard input is empty; pipe some text in")
    return text


class _Line:
    """One line of JSON; a null is as good as a key left out."""

    def __init__(self, where: str, text: str):
        self._where = where
        try:
            found = json.loads(text, object_pairs_hook=self._once)
        except RecursionError:
            self._refuse("nested too deeply to be a request", f"write {_EXAMPLE}")
        except json.JSONDecodeError as error:
            self._refuse(f"not JSON ({error.msg} at character {error.colno})", f"write one object a line, such as {_EXAMPLE}")
        except ValueError as error:
            self._refuse(f"not JSON that can be read ({error})", f"write one object a line, such as {_EXAMPLE}")
        if not isinstance(found, dict):
            self._refuse(f"{_show(found)} is not an object", f"write one a line, such as {_EXAMPLE}")
        for key in found:
            if key not in KEYS:
                self._refuse(f"unknown key {_show(key)}", f"choose of {', '.join(KEYS)}{nearest(key, KEYS)}")
        self._found = {key: value for key, value in found.items() if value is not None}

    def request(self, vocab: int, capacity_tokens: int, new_tokens: int) -> Asked:
        given = [key for key in KEYS[:3] if key in self._found]
        if len(given) != 1:
            what = "both " + " and ".join(given) if given else "neither prompt nor messages nor tokens"
            self._refuse(what, "give one: text, a list of messages, or a list of token ids")
        conversation = self._text("conversation") if "conversation" in self._found else None
        limit = self._new_tokens(capacity_tokens, new_tokens)
        if given == ["messages"]:
            if conversation is not None:
                self._refuse("messages with conversation", "messages hold all that was said; leave conversation out")
            return Asked(self._where, "", limit, messages=self._messages())
        prompt = self._text("prompt") if given == ["prompt"] else self._ids(vocab)
        return Asked(self._where, prompt, limit, conversation)

    def _messages(self) -> tuple[Mapping[str, Any], ...]:
        value = self._found["messages"]
        if not isinstance(value, list) or not value:
            self._refuse(f"messages is {_show(value)}, not a list of some", f"write them in brackets, such as {_MESSAGES}")
        for message in value:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                self._refuse(f"messages holds {_show(message)}", f"write objects with role and content, such as {_MESSAGES}")
        return tuple(value)

    def _text(self, key: str) -> str:
        value = self._found[key]
        if not isinstance(value, str):
            self._refuse(f"{key} is {_show(value)}, not a text", "write it in quotes")
        if not value:
            self._refuse(f"{key} is empty", "give some text, or leave the line out")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self._refuse(f"{key} holds half a character, {_show(value[error.start])}", "write both halves of the pair, or the character")
        return value

    def _ids(self, vocab: int) -> tuple[int, ...]:
        value = self._found["tokens"]
        if not isinstance(value, list):
            self._refuse(f"tokens is {_show(value)}, not a list", "write token ids in brackets, such as [5, 9]")
        if not value:
            self._refuse("tokens is empty", "give some ids, or leave the line out")
        for token in value:
            if type(token) is not int or not 0 <= token < vocab:
                self._refuse(f"tokens holds {_show(token)}", f"the model's vocabulary has ids 0 to {vocab - 1}; give such")
        return tuple(value)

    def _new_tokens(self, capacity_tokens: int, usual: int) -> int:
        value = self._found.get("max_new_tokens", usual)
        if type(value) is not int:
            self._refuse(f"max_new_tokens is {_show(value)}, not a whole number", f"give 1 to {capacity_tokens - 1}")
        if value < 1:
            self._refuse(f"max_new_tokens={_show(value)}", f"give 1 to {capacity_tokens - 1}")
        if value >= capacity_tokens:
            held = f"the plan holds KV for {capacity_tokens} tokens a sequence, so 1 to {capacity_tokens - 1} are allowed"
            self._refuse(f"max_new_tokens={_show(value)}", f"{held}; solve again with workload.new_tokens={value}")
        return value

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key in _repeated(pairs):
            self._refuse(f"key {_show(key)} is given twice", "keep one of them")
        return dict(pairs)

    def _refuse(self, wrong: str, remedy: str) -> NoReturn:
        raise UserError(f"{self._where}: {wrong}; {remedy}") from None


def _repeated(pairs: list[tuple[str, Any]]) -> Iterator[str]:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            yield key
        seen.add(key)


def _show(value: object) -> str:
    """``value`` as JSON in printable ASCII, shortened."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
