"""How models write calls of functions: to be read by transformers' response parser, and as a grammar that makes a reply call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.runtime.serve.dialects.grammar_text import Marks, either, schema_rule
from penstock.runtime.serve.dialects.talk_asked import Tool

ResponseTemplate = Mapping[str, Any]
"""As transformers documents it: ``fields`` with what opens and closes each."""
Writer = Callable[[Marks, Sequence[Tool], bool], str]
"""(how marks are written, tools, whether several calls may come) -> the right side of a Lark rule."""

_ANY_TEXT = {"content": "text", "content_args": {"strip": False}}


@dataclass(frozen=True)
class CallFormat:
    """One way to write calls."""

    read: ResponseTemplate
    write: Writer | None
    """None: a reply that must call is plain JSON instead (:data:`BARE`)."""
    reasoned: bool = False
    """Whether ``read`` sets reasoning apart, too."""
    opens: str | None = None
    """What a call begins with, and no other text does; None where there is no such mark."""
    behind: Writer | None = None
    """The rest of one call, behind ``opens``."""


def calls_of(value: Any) -> list[tuple[str, Any]] | None:
    """(name, arguments) of each call in what a response template has read; None where it is none."""
    found = value if isinstance(value, list) else [value]
    calls = []
    for one in found:
        one = one.get("function", one) if isinstance(one, Mapping) else one
        if not isinstance(one, Mapping) or not isinstance(one.get("name"), str):
            return None
        arguments = one.get("arguments", one.get("parameters", {}))
        if not isinstance(arguments, Mapping):
            return None
        calls.append((one["name"], dict(arguments)))
    return calls or None


def _tagged(marks: Marks, tools: Sequence[Tool], several: bool) -> str:
    call = f"{marks.text('<tool_call>')} {_in_tag(marks, tools, several)}"
    return f'({call}) ("\\n" {call})*' if several else call


def _in_tag(marks: Marks, tools: Sequence[Tool], several: bool) -> str:
    return f'"\\n" ({_objects(tools, "arguments")}) {marks.text(chr(10) + "</tool_call>")}'


def _listed(marks: Marks, tools: Sequence[Tool], several: bool) -> str:
    return f"{marks.text('[TOOL_CALLS]')} {_list(marks, tools, several)}"


def _list(marks: Marks, tools: Sequence[Tool], several: bool) -> str:
    one = f"({_objects(tools, 'arguments')})"
    more = f'(", " {one})*' if several else ""
    return f'"[" {one} {more} "]"'


def _with_args(marks: Marks, tools: Sequence[Tool], several: bool) -> str:
    call = f"{marks.text('[TOOL_CALLS]')} ({_args(marks, tools, several)})"
    return f"({call}){'+' if several else ''}"


def _args(marks: Marks, tools: Sequence[Tool], several: bool) -> str:
    return either(f"{marks.text(f'{tool.name}[ARGS]')} {schema_rule(tool.arguments)}" for tool in tools)


def _one_object(marks: Marks, tools: Sequence[Tool], several: bool) -> str:
    return _objects(tools, "parameters")


def _channel(marks: Marks, tools: Sequence[Tool], several: bool) -> str:
    """gpt-oss: one message to a function, which ends the reply."""
    return either(
        f"{marks.text(f'<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>')} {schema_rule(tool.arguments)}"
        for tool in tools
    )


def _objects(tools: Sequence[Tool], key: str) -> str:
    return either(f"{_quoted(tool, key)} {schema_rule(tool.arguments)} {Marks.plain('}')}" for tool in tools)


def _quoted(tool: Tool, key: str) -> str:
    return Marks.plain(f'{{"name": "{tool.name}", "{key}": ')


def _template(**calls: Any) -> ResponseTemplate:
    call = {"repeats": True, "content": "json", "content_args": {"allow_non_json": True}, **calls}
    return {"start_anchor": "\0", "fields": {"content": _ANY_TEXT, "tool_calls": call}}


_NAMED = {"transform": {"name": "{name}", "arguments": "{content}"}}
BARE = CallFormat(_template(open_pattern=r"\A\s*(?=\[)"), _list)
"""A list of objects with ``name`` and ``arguments``, and nothing else: for a model whose own way cannot be written as a grammar."""
_TAGGED = CallFormat(_template(open_pattern=r"\s*<tool_call>", close="</tool_call>"), _tagged, False, "<tool_call>", _in_tag)
_ELEMENTS = CallFormat(
    _template(
        open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        **_NAMED,
    ),
    None,
)
_LISTED = CallFormat(_template(open="[TOOL_CALLS]"), _listed, False, "[TOOL_CALLS]", _list)
_WITH_ARGS = CallFormat(
    _template(open_pattern=r"\[TOOL_CALLS\](?P<name>[\w.-]{1,128})\[ARGS\]", close_pattern=r"(?=\[TOOL_CALLS\])", **_NAMED),
    _with_args,
    opens="[TOOL_CALLS]",
    behind=_args,
)
_OBJECT = CallFormat(_template(open_pattern=r"\A\s*(?:<\|python_tag\|>)?(?=\{\s*\"name\"\s*:)"), _one_object)
_CHANNELS = CallFormat(
    {
        "start_anchor": "<|start|>assistant",
        "fields": {
            "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": ["<|end|>", "<|return|>"], **_ANY_TEXT},
            "content": {
                "open_pattern": r"<\|channel\|>(?:final|commentary)(?:\s*<\|constrain\|>\s*\w+)?<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "",
                **_ANY_TEXT,
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|channel\|>\w+)?\s+to=functions\.(?P<name>[\w.-]{1,128})(?:<\|channel\|>\w+)?"
                r"(?:\s*<\|constrain\|>\s*\w+|\s+json)?<\|message\|>",
                "close": ["<|call|>", "<|end|>", "<|return|>"],
                "repeats": True,
                "content": "json",
                "content_args": {"allow_non_json": True},
                **_NAMED,
            },
        },
    },
    _channel,
    reasoned=True,
)
_BY_MARKS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|channel|>", "to=functions."), _CHANNELS),
    (("<tool_call>", "<function=", "<parameter="), _ELEMENTS),
    (("<tool_call>", "arguments"), _TAGGED),
    (("[TOOL_CALLS]", "[ARGS]"), _WITH_ARGS),
    (("[TOOL_CALLS]",), _LISTED),
    (('"parameters": ', "tools"), _OBJECT),
)
"""What a chat template holds that writes calls so: gpt-oss; Qwen 3.5 and Qwen3-Coder; Qwen 2.5, Qwen 3, Hermes and others; Mistral, newer
and older; Llama 3."""


def find_calls(template: str, response_template: ResponseTemplate | None) -> CallFormat | None:
    """By the checkpoint's own response template, else by its chat ``template``; None where neither says how calls are written."""
    known = next((form for marks, form in _BY_MARKS if all(mark in template for mark in marks)), None)
    if response_template is not None and "tool_calls" in response_template.get("fields", {}):
        own = _forgiving(response_template)
        return CallFormat(own, None, reasoned=True) if known is None else replace(known, read=own, reasoned=True)
    return known


def _forgiving(template: ResponseTemplate) -> ResponseTemplate:
    """The same, with JSON that cannot be read as text instead of an error."""
    fields = {
        name: {**said, "content_args": {**said.get("content_args", {}), "allow_non_json": True}} if said.get("content") == "json" else said
        for name, said in template["fields"].items()
    }
    return {**template, "fields": fields}
