"""What was said in a conversation, as messages and as the token ids that the model is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.runtime.asked.chat_template import ChatTemplate
from penstock.runtime.asked.prompts import Vocabulary
from penstock.runtime.asked.reasoning import Reasoning, Splitter, find_reasoning

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


class Dialogue:
    """Turns of a person and a model, rendered by ``template``; without one the text goes on as it is typed.

    A prompt begins with the ids of all turns before, as they were computed, wherever the template renders these as it did: so their KV can
    be kept. Where it renders them otherwise (it drops earlier reasoning, say), the ids are read from the text anew.
    """

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate | None, system: str | None = None):
        self._vocabulary, self._template, self._system = vocabulary, template, system
        self._reasoning: Reasoning | None = None if template is None else find_reasoning(vocabulary)
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.messages: list[dict[str, Any]] = [] if self._system is None else [{"role": SYSTEM, "content": self._system}]
        self._text = ""
        self._ids: tuple[int, ...] = ()

    def ask(self, text: str) -> tuple[int, ...]:
        """The person says ``text`` -> the prompt that the model replies to. Raises UserError for what the template refuses, and then
        nothing was said."""
        self.messages.append({"role": USER, "content": text})
        try:
            self._text, self._ids = self._rendered(text)
        except BaseException:
            self.messages.pop()
            raise
        return self._ids

    def hear(self, tokens: Sequence[int]) -> None:
        """The model has replied with ``tokens``."""
        said, own = list(tokens), self._reasoning
        message = {"content": self._vocabulary.text(said)} if own is None else own.message(self._text, said)
        self.messages.append({"role": ASSISTANT, **message})
        self._text += self._vocabulary.marked_text(said)
        self._ids += tuple(said)

    def take_back(self) -> None:
        """The person's last word was never said."""
        self.messages.pop()
        self._text, self._ids = "", ()

    def shorten(self) -> bool:
        """Forget the first turn and its reply, if there are others -> whether it did. Of raw text nothing is forgotten."""
        asked = [k for k, message in enumerate(self.messages) if message["role"] == USER]
        if len(asked) < 2 or self._template is None:
            return False
        del self.messages[asked[0] : asked[1]]
        self._text, self._ids = self._template.text(self.messages, "the conversation"), ()
        self._ids = self._read(self._text)
        return True

    def reply(self) -> tuple[Callable[[list[int]], str], Splitter | None]:
        """How the reply to the prompt as it stands is decoded, and what sets its reasoning apart."""
        own = self._reasoning
        return (self._vocabulary.text, None) if own is None else (own.decode, own.splitter(self._text))

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt as it stands."""
        return self._ids

    def _rendered(self, text: str) -> tuple[str, tuple[int, ...]]:
        if self._template is None:
            whole = self._text + text
            return whole, self._ids + self._read(text, special=not self._ids)
        whole = self._template.text(self.messages, "the conversation")
        if self._text and whole.startswith(self._text):
            return whole, self._ids + self._read(whole[len(self._text) :])
        return whole, self._read(whole)

    def _read(self, text: str, special: bool = False) -> tuple[int, ...]:
        assert self._vocabulary.tokenizer is not None
        return tuple(self._vocabulary.tokenizer(text, add_special_tokens=special)["input_ids"])
