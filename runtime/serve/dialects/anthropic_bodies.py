"""The body of Anthropic's /v1/messages and of its count_tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.runtime.serve.dialects.bodies import Body, Repeated, lines
from penstock.runtime.serve.dialects.chat_bodies import FunctionName, Schema, distinct, effort_options, known, template_call, template_id
from penstock.runtime.serve.dialects.model_talk import Talk
from penstock.runtime.serve.dialects.talk_asked import Choice, TalkAsked, Tool
from penstock.runtime.serve.dialects.wrong_request import WrongRequest

_UNREAD = "cannot be read, this server reads text; leave it out"


class CacheControl(Body):
    """Taken, and of no effect: what prompts begin with alike is kept in any case."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Repeated):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class OtherBlock(Body):
    """What this server cannot read; it is refused in words."""

    model_config = {**Body.model_config, "extra": "allow"}
    type: Literal["image", "document", "search_result", "server_tool_use", "web_search_tool_result", "redacted_thinking"]


class ToolUseBlock(Repeated):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None


class ToolResultBlock(Repeated):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | OtherBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Repeated):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | OtherBlock, Field(discriminator="type")]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Repeated):
    name: FunctionName
    input_schema: Schema
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicChoice(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class AnthropicNamed(Body):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class ThinkingEnabled(Body):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1024)
    """What to aim at, where the model's template can say so."""
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Body):
    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(Body):
    type: Literal["disabled"]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(Body):
    user_id: str | None = None


class AnthropicTalk(Body):
    """What count_tokens takes, and /v1/messages with it."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=128)] | None = None
    tool_choice: Annotated[AnthropicChoice | AnthropicNamed, Field(discriminator="type")] | None = None
    thinking: Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AnthropicBody(AnthropicTalk):
    """What is asked of /v1/messages."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)] | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    top_p: float | None = Field(None, ge=0, le=1)
    metadata: AnthropicMetadata | None = None
    """Taken, and of no effect."""
    service_tier: Literal["auto", "standard_only"] | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    cache_salt: str | None = Field(None, max_length=256)


def anthropic_asked(body: AnthropicTalk, talk: Talk) -> TalkAsked:
    """What ``body`` asks of ``talk``. WrongRequest for what a text model cannot read, and thinking that its template cannot do."""
    tools = tuple(Tool(t.name, t.description, t.input_schema) for t in body.tools or ())
    choice, named = _choice(body.tool_choice)
    messages = [] if body.system is None else [{"role": "system", "content": _texts(body.system, "system")}]
    for k, message in enumerate(body.messages):
        messages += _messages(message, talk, f"messages.{k}")
    form = None if body.output_config is None else body.output_config.format
    return TalkAsked(
        messages=messages,
        tools=distinct(tools),
        choice=known(choice, named, tools),
        named=named,
        parallel=not (body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use),
        schema=None if form is None else form.schema_,
        schema_key="output_config.format",
        options={**_thinking(body, talk), **(body.chat_template_kwargs or {})},
        continued=messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"),
    )


def _thinking(body: AnthropicTalk, talk: Talk) -> dict[str, Any]:
    """A model thinks only where it is asked to, as far as its template can say so."""
    asked, effort = body.thinking, None if body.output_config is None else body.output_config.effort
    if asked is None or isinstance(asked, ThinkingDisabled):
        return effort_options("none", talk)
    if not talk.reasons:
        raise WrongRequest("thinking: this model's replies mark no reasoning; leave it out, or say type='disabled'", "thinking")
    if isinstance(asked, ThinkingEnabled) and talk.writes("thinking_budget"):
        return effort_options(effort or "medium", talk) | {"thinking_budget": asked.budget_tokens}
    return effort_options(effort or "medium", talk)


def _messages(message: AnthropicMessage, talk: Talk, where: str) -> list[dict[str, Any]]:
    """Results of calls come first, each as a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    said: list[dict[str, Any]] = []
    texts, thoughts, calls = [], [], []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(template_call(block.id, block.name, json.dumps(block.input), where))
            case ToolResultBlock():
                said.append({"role": "tool", "tool_call_id": template_id(block.tool_use_id), "content": _texts(block.content or "", where)})
            case OtherBlock():
                raise WrongRequest(f"{where}: a block of type {block.type!r} {_UNREAD}", where)
    wrong = "tool_result" if said and message.role != "user" else "tool_use" if calls and message.role != "assistant" else None
    if wrong:
        raise WrongRequest(f"{where}: {wrong} blocks do not belong in a message of role {message.role!r}", where)
    if texts or calls or not said:
        own: dict[str, Any] = {"role": message.role, "content": lines(texts)}
        own |= {"tool_calls": calls} if calls else {}
        said.append(own | ({talk.reasoning_key: lines(thoughts)} if thoughts else {}))
    return said


def _texts(content: str | Sequence[TextBlock | OtherBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if isinstance(block, OtherBlock):
            raise WrongRequest(f"{where}: a block of type {block.type!r} {_UNREAD}", where)
    return lines(block.text for block in content if isinstance(block, TextBlock))


def _choice(said: AnthropicChoice | AnthropicNamed | None) -> tuple[Choice, frozenset[str] | None]:
    if isinstance(said, AnthropicNamed):
        return "required", frozenset({said.name})
    if said is None or said.type == "auto":
        return "auto", None
    return "required" if said.type == "any" else "none", None
