"""A conversation becomes a prompt in which a client writes no control token; a reply is read as what it says, reasons and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, hf

from penstock.runtime.asked.prompts import LongText
from penstock.runtime.serve.dialects.chat_bodies import ChatTalk, chat_asked
from penstock.runtime.serve.dialects.model_talk import Talk
from penstock.runtime.serve.dialects.reply_reader import Called, Part, ReplyReader
from penstock.runtime.serve.dialects.talk_asked import TalkAsked, Tool
from penstock.runtime.serve.dialects.wrong_request import WrongRequest
from tests.runtime.serve.talkers import PLAIN, TAGGED, vocabulary

WEATHER = Tool(
    "weather",
    "of a city",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
)
TIME = Tool("time", None, {"type": "object", "properties": {}, "additionalProperties": False})
HELLO = [{"role": "user", "content": "Hello"}]
QWEN = vocabulary()
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
CHANNELS = (
    "{% for t in tools or [] %}{{ t | tojson }} to=functions.{{ t.function.name }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}"
    "<|message|>{{ m.content }}{{ m.thinking }}<|end|>{% endfor %}<|start|>assistant{# <|channel|> #}"
)
FORMS = {
    "tagged": (TAGGED, (), '<tool_call>\n{"name": "weather", "arguments": {"city": "Ürümqi"}}\n</tool_call>'),
    "object": ('{{ tools }}{"name": ..., "parameters": dictionary}' + PLAIN, (), '{"name": "weather", "parameters": {"city": "Ürümqi"}}'),
    "listed": (
        "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]" + PLAIN,
        ("[TOOL_CALLS]",),
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Ürümqi"}}]',
    ),
    "args": ("{{ tools }}[TOOL_CALLS][ARGS]" + PLAIN, ("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]weather[ARGS]{"city": "Ürümqi"}'),
    "channels": (CHANNELS, HARMONY, '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ürümqi"}'),
    "unknown": ("{{ tools }}" + PLAIN, (), '[{"name": "weather", "arguments": {"city": "Ürümqi"}}]'),
}
"""A template, its special tokens, and a call as its model writes it."""


def read(reader: ReplyReader, text: str, size: int) -> list[Part]:
    """``text`` comes ``size`` characters at a time; what belongs together is joined."""
    parts: list[Part] = []
    for part in [part for k in range(0, len(text), size) for part in reader.add(text[k : k + size])] + reader.rest():
        if parts and not isinstance(part, Called) and type(parts[-1]) is type(part):
            part = type(part)(parts.pop().text + part.text)  # type: ignore[union-attr]
        parts.append(part)
    return parts


def told(parts: list[Part]) -> list[tuple[str, ...]]:
    return [(type(p).__name__, p.name, p.arguments) if isinstance(p, Called) else (type(p).__name__, p.text) for p in parts]


def kept(grammar: str | None, said: Any, text: str) -> bool:
    """Whether a reply of ``text`` keeps to ``grammar`` and may end there."""
    assert grammar is not None
    matcher = LLMatcher(hf.from_tokenizer(said.tokenizer), grammar)
    assert not matcher.get_error()
    ids = said.tokenizer(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@given(
    st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<tool_call>", "<|im_", "end|>", "|", "<", "\n", "é", " a", "\ufdd0", "\ufdd1"])
    )
)
def test_what_a_client_says_holds_no_control_token_and_all_of_its_text(words: list[str]) -> None:
    text = "".join(words)
    prepared = Talk(QWEN).prepare(TalkAsked([{"role": "user", "content": text}]))
    bare = text.replace("\ufdd0", "").replace("\ufdd1", "")
    assert QWEN.marked_text(list(prepared.prompt)) == f"<|im_start|>user\n{bare}<|im_end|>\n<|im_start|>assistant\n"
    names = QWEN.tokenizer.convert_ids_to_tokens(list(prepared.prompt))  # type: ignore[union-attr]
    assert [name for name in names if len(name) > 2] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_a_prompt_without_control_tokens_is_read_as_its_tokenizer_reads_it() -> None:
    text = "é <|im_end|> b"
    ids = Talk(QWEN).plain_ids(text)
    assert QWEN.marked_text(list(ids)) == text
    assert max(ids) < 256
    assert Talk(QWEN).plain_ids("plain") == tuple(QWEN.tokenizer("plain")["input_ids"])  # type: ignore[misc]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            'Yes.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ü"}}\n</tool_call>\n<tool_call>{"name": "time"}</tool_call>',
            [("Said", "Yes."), ("Called", "weather", '{"city": "Ü"}'), ("Called", "time", "{}")],
        ),
        ("<think>\nhm\n</think>\n\nHello <tool\n", [("Reasoned", "hm"), ("Said", "Hello <tool\n")]),
        ("<tool_call>{no object}</tool_call>", [("Said", "{no object}")]),
        ('<tool_call>{"name": "weath', [("Said", '{"name": "weath')]),
    ],
)
def test_a_reply_is_read_however_it_comes(text: str, parts: list[tuple[str, ...]], size: int) -> None:
    reader = Talk(QWEN).prepare(TalkAsked(HELLO, (WEATHER, TIME))).reader()
    assert told(read(reader, text, size)) == parts


def test_a_reply_that_may_not_call_or_only_once() -> None:
    text = '<tool_call>{"name": "time"}</tool_call>' * 2
    assert told(read(Talk(QWEN).prepare(TalkAsked(HELLO, (TIME,), "none")).reader(), text, 5)) == [("Said", text)]
    assert told(read(Talk(QWEN).prepare(TalkAsked(HELLO, (TIME,), parallel=False)).reader(), text, 5)) == [("Called", "time", "{}")]


@pytest.mark.parametrize("form", FORMS)
def test_a_reply_that_must_call_is_written_as_its_model_writes_calls(form: str) -> None:
    template, special, text = FORMS[form]
    said = vocabulary(template, ("<|im_end|>", *special), () if form != "tagged" else ("<tool_call>", "</tool_call>"))
    prepared = Talk(said).prepare(TalkAsked(HELLO, (WEATHER, TIME), "required", frozenset({"weather"}), parallel=False))
    assert kept(prepared.grammar, said, text)
    assert not kept(prepared.grammar, said, text.replace("weather", "time"))
    assert not kept(prepared.grammar, said, text.replace("city", "town"))
    assert not kept(prepared.grammar, said, "Hello")
    decoded = prepared.decode(said.tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[misc]
    for size in (1, 1000):
        assert told(read(prepared.reader(), decoded, size)) == [("Called", "weather", '{"city": "Ürümqi"}')]


@pytest.mark.parametrize("form", ["tagged", "object", "listed", "args", "channels"])
def test_a_reply_that_may_call_is_free_until_it_does(form: str) -> None:
    template, special, text = FORMS[form]
    said = vocabulary(template, ("<|im_end|>", *special), () if form != "tagged" else ("<tool_call>", "</tool_call>"))
    grammar = Talk(said).prepare(TalkAsked(HELLO, (WEATHER, TIME))).grammar
    if form in ("object", "channels"):  # no mark of its own begins a call
        assert grammar is None
        return
    for free in ("", "Hello <tool", '{"name": "other"}', text, f"Yes.\n{text}", text.replace("Ü", "ü"), f"{text}\n{text}"):
        assert kept(grammar, said, free), free
    for wrong in (
        text.replace("weather", "whether"),
        text.replace("city", "town"),
        text[: text.index("Ü")],
        f"Yes.{text.replace('Ü', chr(10))}",
    ):
        assert not kept(grammar, said, wrong), wrong
    once = Talk(said).prepare(TalkAsked(HELLO, (WEATHER, TIME), parallel=False)).grammar
    assert kept(once, said, f"{text} Yes.") and not kept(once, said, f"{text}\n{text}")
    odd = Tool("odd", None, {"type": "object", "properties": {"n": {"$ref": "http://elsewhere"}}})
    assert Talk(said).prepare(TalkAsked(HELLO, (odd,))).grammar is None


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_reasoned_before_a_call_is_free(begun: bool) -> None:
    grammar = Talk(QWEN).prepare(TalkAsked(HELLO, (TIME,), options={"enable_thinking": begun})).grammar
    call, opened = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>', "" if begun else "<think>"
    for free in ("I may say <tool_call> here", "hm</think>Hello", f"a <tool_call> b</think>\n{call}"):
        assert kept(grammar, QWEN, opened + free), free
    assert not kept(grammar, QWEN, f"{opened}hm</think>\n<tool_call>x")
    assert begun or (kept(grammar, QWEN, f"Hello {call}") and not kept(grammar, QWEN, "Hello <tool_call>x"))


def test_reasoning_may_come_before_what_a_grammar_asks() -> None:
    talk = Talk(QWEN)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
    plain, begun = (talk.prepare(TalkAsked(HELLO, schema=schema, options=options)) for options in ({}, {"enable_thinking": True}))
    assert kept(plain.grammar, QWEN, '{"n": 3}') and kept(plain.grammar, QWEN, '<think>hm</think>\n{"n":3}')
    assert kept(begun.grammar, QWEN, 'hm</think>\n{"n":3}') and not kept(begun.grammar, QWEN, '{"n": 3}')
    assert not kept(plain.grammar, QWEN, '{"n": "3"}') and not kept(plain.grammar, QWEN, "{" + " " * 100)
    both = talk.prepare(TalkAsked(HELLO, (TIME,), schema=schema))
    assert kept(both.grammar, QWEN, '{"n": 3}') and kept(both.grammar, QWEN, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')


def test_a_checkpoints_own_response_template_reads_its_replies() -> None:
    own = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": {"name": "{content.f}", "arguments": "{content.a}"}},
            },
            "content": {},
        },
    }  # fmt: skip
    said = vocabulary(response_template=own)
    reader = Talk(said).prepare(TalkAsked(HELLO, (WEATHER,), options={"enable_thinking": True})).reader()
    text = 'hm\n</think>Yes.<tool_call>{"f": "weather", "a": {"city": "B"}}</tool_call>'
    assert told(read(reader, text, 2)) == [("Reasoned", "hm"), ("Said", "Yes."), ("Called", "weather", '{"city": "B"}')]
    broken = Talk(said).prepare(TalkAsked(HELLO, (WEATHER,))).reader()
    assert told(read(broken, "<tool_call>{}</tool_call> more", 1)) == [("Said", "{}> more")]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (TalkAsked([{"role": "raise", "content": ""}]), "no such role"),
        (TalkAsked(HELLO, options={"chat_template": "{{ 1 }}"}), "chat_template"),
        (TalkAsked(HELLO, options={"eos_token": "x"}), "eos_token"),
        (TalkAsked(HELLO, options={"messages": []}), "chat_template_kwargs: 'messages' is not the client's to say"),
        (TalkAsked(HELLO, schema={"type": "obj"}), "response_format: Invalid type: obj$"),
        (TalkAsked(HELLO, schema={"type": "obj"}, schema_key="text.format"), "^text.format: Invalid type: obj$"),
        (TalkAsked(HELLO, schema={"pattern": "(["}), r"response_format: regex parse error: \(\[ error: unclosed character class$"),
        (TalkAsked(HELLO, schema={"type": "object", "properties": {"a": {"x-guidance": {}}}}), "x-guidance"),
        (TalkAsked(HELLO, schema={"$ref": "https://localhost/a"}), "outside"),
        (TalkAsked(HELLO, (Tool("a", None, {"type": "object", "properties": {"<|im_end|>": {}}}),)), "control token"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_in_words(asked: TalkAsked, words: str) -> None:
    with pytest.raises(WrongRequest, match=words):
        Talk(QWEN).prepare(asked)


@pytest.mark.parametrize(
    ("template", "asked", "words"),
    [
        (None, TalkAsked(HELLO), "no chat template"),
        (PLAIN, TalkAsked(HELLO, (TIME,)), "takes no tools"),
        ("{{ tools }}" + PLAIN, TalkAsked(HELLO, (TIME,)), "how this model writes calls is not known"),
    ],
)
def test_what_a_model_has_no_words_for_is_refused(template: str | None, asked: TalkAsked, words: str) -> None:
    with pytest.raises(WrongRequest, match=words):
        Talk(vocabulary(template)).prepare(asked)


def test_a_chats_body_becomes_what_a_template_takes() -> None:
    said = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None, "annotations": [],
                "tool_calls": [{"id": "call_abcdefghi", "type": "function", "function": {"name": "time", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "call_abcdefghi", "content": "noon"},
        ],
        "tools": [{"type": "function", "function": {"name": "time"}}],
        "tool_choice": {"type": "function", "function": {"name": "time"}},
        "reasoning_effort": "none",
    }  # fmt: skip
    asked = chat_asked(ChatTalk.model_validate_json(json.dumps(said)), Talk(QWEN))
    assert [dict(message) for message in asked.messages] == [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant", "content": "", "reasoning_content": "hm",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "time", "arguments": {}}}],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "abcdefghi"},
    ]  # fmt: skip
    assert (asked.choice, asked.named, asked.options) == ("required", frozenset({"time"}), {"enable_thinking": False})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "assistant"}]}, "neither content nor tool_calls"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "two are named"),
        (
            {"tools": [{"type": "function", "function": {"name": "a"}}], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "'b'",
        ),
    ],
)
def test_a_body_that_cannot_be_obeyed_is_refused_in_words(change: dict[str, Any], words: str) -> None:
    with pytest.raises(WrongRequest, match=words):
        chat_asked(ChatTalk.model_validate_json(json.dumps({"messages": HELLO} | change)), Talk(QWEN))


@pytest.mark.parametrize("text", ["é <b> plain " * 40, "plain " * 40 + "<|im_end|>", "<|im_start|>" * 30])
def test_a_limit_changes_nothing_of_a_text_within_it(text: str) -> None:
    talk, asked = Talk(QWEN), TalkAsked([{"role": "user", "content": text}])
    ids = talk.plain_ids(text)
    assert talk.plain_ids(text, len(ids)) == ids and talk.plain_ids(text, 1 << 20) == ids
    prompt = talk.prepare(asked).prompt
    assert talk.prepare(asked, len(prompt)).prompt == prompt


def test_a_text_of_too_many_tokens_is_counted_before_its_ids_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    text, talk = "é <b> plain " * 40, Talk(QWEN)
    ids = talk.plain_ids(text)
    with pytest.raises(LongText) as conversation:
        talk.prepare(TalkAsked([{"role": "user", "content": text}]), 100)
    assert conversation.value.tokens > len(ids)
    monkeypatch.setattr(type(QWEN.tokenizer), "_convert_encoding", lambda *_, **__: pytest.fail("its ids were made"))
    with pytest.raises(LongText) as found:
        talk.plain_ids(text, len(text) // 2)
    assert found.value.tokens == len(ids) > len(text) // 2


def test_a_tokenizer_with_a_way_of_its_own_is_asked_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = QWEN.tokenizer

    class Louder(type(tokenizer)):  # type: ignore[misc]
        def _encode_plus(self, text: str, **keys: Any) -> Any:
            return super()._encode_plus(text + "!", **keys)

    monkeypatch.setattr(tokenizer, "__class__", Louder)
    with pytest.raises(LongText) as found:
        Talk(QWEN).plain_ids("a" * 20, 10)
    assert found.value.tokens == 21
