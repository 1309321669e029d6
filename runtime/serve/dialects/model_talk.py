"""A conversation as a prompt for the model, and how its reply is read."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_parsing import ResponseParser

from penstock.runtime.asked.prompts import Vocabulary, text_ids
from penstock.runtime.asked.reasoning import HARMONY, find_reasoning
from penstock.runtime.serve.dialects.call_formats import BARE, CallFormat, find_calls
from penstock.runtime.serve.dialects.control_tokens import ControlTokens
from penstock.runtime.serve.dialects.grammar_text import (
    Marks,
    calling_grammar,
    check_grammar,
    check_schema,
    either,
    reply_grammar,
    schema_rule,
)
from penstock.runtime.serve.dialects.reply_reader import ReplyReader
from penstock.runtime.serve.dialects.talk_asked import TalkAsked, Tool
from penstock.runtime.serve.dialects.wrong_request import WrongRequest

_FINAL = "<|channel|>final<|message|>"
_ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant")
"""gpt-oss: before its answer; around what it reasons, and what comes then."""


@dataclass(frozen=True)
class Prepared:
    """What the model is given, and how its replies are read."""

    prompt: tuple[int, ...]
    grammar: str | None
    """llguidance's, for the whole reply."""
    decode: Callable[[list[int]], str]
    """A reply's ids as the text that ``reader`` takes: what marks reasoning and calls is visible, other special tokens are not."""
    reader: Callable[[], ReplyReader]
    """For one reply."""


class Talk:
    """Conversations with one model: its chat template with ``options``, its marks of reasoning, its way to write calls."""

    def __init__(self, vocabulary: Vocabulary, options: Mapping[str, Any] | None = None):
        self._tokenizer, self._vocabulary = vocabulary.tokenizer, vocabulary
        self._options = dict(options or {})
        said = getattr(self._tokenizer, "chat_template", None) or ""
        self._template = said if isinstance(said, str) else "\n".join(map(str, said.values()))
        if self._tokenizer is None:
            return
        self._control = ControlTokens(self._tokenizer, self._template)
        self._marks = Marks(self._tokenizer)
        self._reasoning = find_reasoning(vocabulary)
        self._own = getattr(self._tokenizer, "response_template", None)
        self._calls = find_calls(self._template, self._own)
        self._reserved = {
            "messages",
            *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
            *self._tokenizer.special_tokens_map,
        }

    @property
    def reasoning_key(self) -> str:
        """Under which the template reads a message's reasoning."""
        return "reasoning_content" if self._tokenizer is None or self._reasoning is None else self._reasoning.key

    @property
    def reasons(self) -> bool:
        """Whether replies mark what they reason."""
        return self._tokenizer is not None and (self._reasoning is not None or self._own is not None)

    def writes(self, word: str) -> bool:
        """Whether the template has ``word``, such as the name of an option or of a role."""
        return re.search(rf"\b{re.escape(word)}\b", self._template) is not None

    def plain_ids(self, text: str, most: int | None = None) -> tuple[int, ...]:
        """A client's ``text`` as token ids, with what the tokenizer puts before a text; special tokens in it stay text. LongText where it
        is known at once that they are more than ``most``."""
        tokenizer = self._have()
        if self._control.mark(text) == text:
            return tuple(text_ids(tokenizer, text, True, most))
        return tuple(text_ids(tokenizer, "", True)) + self._control.plain_ids(text, most)

    def prepare(self, asked: TalkAsked, most: int | None = None) -> Prepared:
        """WrongRequest for a conversation that the template refuses, a schema that cannot be kept to, calls that the model has no way to
        write. LongText as :meth:`plain_ids`."""
        tokenizer = self._have()
        if not self._template:
            raise WrongRequest("this model has no chat template; ask /v1/completions with the text as it is", "messages")
        calling = asked.tools if asked.choice != "none" else ()
        allowed = tuple(tool for tool in calling if asked.named is None or tool.name in asked.named)
        shown = calling if asked.choice == "required" else allowed
        if calling and not allowed:
            raise WrongRequest(f"tool_choice: none of its functions is in tools ({', '.join(t.name for t in calling)})", "tool_choice")
        form = self._form(asked, allowed)
        marked = self._rendered(tokenizer, asked, shown)
        prompt = self._control.text(marked)
        grammar = self._grammar(asked, allowed, form, prompt)
        own = self._own if self._own is not None and (form is None or form.reasoned) else None if form is None else form.read
        reasoned_here = own is not None and (form is None or form.reasoned)

        def reader() -> ReplyReader:
            splitter = None if reasoned_here or self._reasoning is None else self._reasoning.splitter(prompt)
            said: list[dict[str, Any] | Callable[..., Any]] = [tool.rendered() for tool in shown]
            parser = None if own is None else ResponseParser(dict(own), prefix=prompt if reasoned_here else "", tools=said)
            return ReplyReader(splitter, parser, several=asked.parallel)

        return Prepared(self._control.ids(marked, most), grammar, self._decode(own), reader)

    def _have(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise WrongRequest("this checkpoint has no tokenizer; ask /v1/completions with token ids", "messages")
        return self._tokenizer

    def _form(self, asked: TalkAsked, allowed: tuple[Tool, ...]) -> CallFormat | None:
        """How the reply writes calls, None where it writes none."""
        if not allowed:
            return None
        if not self.writes("tools"):
            raise WrongRequest("this model's chat template takes no tools; leave tools out, or say tool_choice='none'", "tools")
        if asked.choice == "required":
            return self._calls if self._calls is not None and self._calls.write is not None else BARE
        if self._calls is None:
            raise WrongRequest(
                "how this model writes calls is not known; say tool_choice='required' or name the function, then a grammar writes the call",
                "tool_choice",
            )
        return self._calls

    def _rendered(self, tokenizer: PreTrainedTokenizerBase, asked: TalkAsked, tools: tuple[Tool, ...]) -> str:
        if wrong := sorted({*asked.options} & self._reserved):
            raise WrongRequest(
                f"chat_template_kwargs: {wrong[0]!r} is not the client's to say; leave it out", f"chat_template_kwargs.{wrong[0]}"
            )
        options = {**self._options, **self._control.mark(dict(asked.options))}
        said = self._control.mark([tool.rendered() for tool in tools]) or None
        messages = self._control.mark([dict(message) for message in asked.messages])
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages,
                    tools=said,
                    tokenize=False,
                    add_generation_prompt=not asked.continued,
                    continue_final_message=asked.continued,
                    **options,
                )
            )
        except Exception as error:  # a template is a program, and may raise anything
            line = self._control.text(" ".join(str(error).split())) or type(error).__name__
            raise WrongRequest(f"the model's chat template refuses the conversation: {line}", "messages", "template") from error

    def _grammar(self, asked: TalkAsked, allowed: tuple[Tool, ...], form: CallFormat | None, prompt: str) -> str | None:
        bodies: list[str] = []
        schemas: dict[str, Mapping[str, Any] | bool] = {}
        marks = () if self._reasoning is None else self._reasoning.marks
        if form is not None and form.write is not None and (asked.choice == "required" or asked.schema is not None):
            for tool in allowed:
                schemas[f"tools.{tool.name}.parameters"] = tool.parameters
            bodies.append(form.write(self._marks, allowed, asked.parallel))
        if asked.schema is not None and asked.choice != "required":
            schemas[asked.schema_key] = asked.schema
            bodies.append(f"{self._marks.text(_FINAL) if marks == HARMONY else ''} {schema_rule(asked.schema)}")
        if not bodies:
            return None if form is None else self._calling(asked, allowed, form, prompt)
        for where, schema in schemas.items():
            check_schema(schema, where)
        if marks == HARMONY:
            grammar = reply_grammar(self._marks, either(bodies), _ANALYSIS, begun=False)
        elif marks:
            pair = (marks[0], marks[1], "")
            grammar = reply_grammar(self._marks, either(bodies), pair, begun=prompt.rstrip().endswith(marks[0].rstrip()))
        else:
            grammar = reply_grammar(self._marks, either(bodies), None, begun=False)
        check_grammar(grammar, schemas)
        return grammar

    def _calling(self, asked: TalkAsked, allowed: tuple[Tool, ...], form: CallFormat, prompt: str) -> str | None:
        """Of a reply that may call: free until a call is opened, then by the function's schema. None where calls have no mark of their own,
        or no grammar can be made of a schema: nothing is refused that needs none."""
        marks = () if self._reasoning is None else self._reasoning.marks
        if form.opens is None or form.behind is None or marks == HARMONY:
            return None
        pair = (marks[0], marks[1]) if marks else None
        begun = pair is not None and prompt.rstrip().endswith(pair[0].rstrip())
        schemas: dict[str, Mapping[str, Any] | bool] = {f"tools.{tool.name}.parameters": tool.parameters for tool in allowed}
        try:
            for where, schema in schemas.items():
                check_schema(schema, where)
            call = form.behind(self._marks, allowed, asked.parallel)
            grammar = calling_grammar(self._marks, form.opens, call, asked.parallel, pair, begun, self._vocabulary.stop_ids)
            check_grammar(grammar, schemas)
        except WrongRequest:
            return None
        return grammar

    def _decode(self, read: Mapping[str, Any] | None) -> Callable[[list[int]], str]:
        tokenizer = self._have()
        kept = "" if read is None else json.dumps(read, ensure_ascii=False).replace("\\", "")
        kept += "" if self._reasoning is None else " ".join(self._reasoning.marks)
        specials = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        hidden = {number for number, token in specials if token not in kept}
        return lambda ids: self._vocabulary.marked_text([number for number in ids if number not in hidden])
