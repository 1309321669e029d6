"""Messages as the text that a model was trained to answer: the tokenizer's own chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.planner.common.errors import UserError, nearest
from penstock.runtime.asked.run_schema import check_template

Message = Mapping[str, Any]
"""``role`` and ``content``, and what else a template reads."""


class ChatTemplate:
    """The template of ``tokenizer``, which must have one, with ``options``, such as ``enable_thinking``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]):
        self._tokenizer, self._options = tokenizer, dict(options)

    def text(self, messages: Sequence[Message], where: str) -> str:
        """``messages`` up to where the reply begins. UserError naming ``where`` for what the template refuses."""
        try:
            said = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True, **self._options
            )
        except Exception as error:  # a template is a program, and may raise anything
            line = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"{where}: the model's chat template refuses it ({line}); change it, or take raw text with template=false"
            ) from error
        return str(said)

    def ids(self, messages: Sequence[Message], where: str) -> tuple[int, ...]:
        """The same as token ids; special tokens are the template's own."""
        return tuple(self._tokenizer(self.text(messages, where), add_special_tokens=False)["input_ids"])


OF_JINJA = frozenset({"and", "defined", "elif", "else", "endfor", "endif", "for", "if", "in", "is", "loop", "not", "or", "set"})
"""Words of every template, which are no option."""


def find_template(tokenizer: PreTrainedTokenizerBase | None, wanted: Any) -> ChatTemplate | None:
    """The template by what ``template=`` says: false is none, options are passed on. None, too, where the tokenizer has none; UserError for
    options then, and for one whose name the template does not have: it would do nothing."""
    check_template(wanted)
    options = wanted if isinstance(wanted, Mapping) else {}
    if wanted is not False and tokenizer is not None and getattr(tokenizer, "chat_template", None):
        words = sorted({*re.findall(r"\b[A-Za-z_]\w*\b", str(tokenizer.chat_template))} - OF_JINJA)
        for name in (name for name in options if name not in words):
            raise UserError(f"template.{name}: the model's chat template has no such option; leave it out{nearest(name, words)}")
        return ChatTemplate(tokenizer, options)
    for name in options:
        raise UserError(f"template.{name}: the model has no chat template that could read it; leave it out")
    return None


def no_template(directory: Path) -> str:
    """Why messages cannot be rendered."""
    return f"{directory}: its tokenizer has no chat template; it continues raw text with template=false"
