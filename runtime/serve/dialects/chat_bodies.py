"""The conversation in the body of OpenAI's /v1/chat/completions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.runtime.serve.dialects.bodies import Body, Repeated, lines
from penstock.runtime.serve.dialects.model_talk import Talk
from penstock.runtime.serve.dialects.talk_asked import Choice, TalkAsked, Tool
from penstock.runtime.serve.dialects.wrong_request import WrongRequest

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Schema = dict[str, Any]
_OURS = re.compile(r"^(?:call|toolu)_(\w{9})$")
"""Ids of calls as this server makes them; what templates check is the last part, of nine letters and digits."""
_ANY_OBJECT = {"type": "object"}


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


class OtherPart(Body):
    """What this server cannot read; it is refused in words."""

    model_config = {**Body.model_config, "extra": "allow"}
    type: Literal["image_url", "input_audio", "file"]


ContentPart = Annotated[TextPart | RefusalPart | OtherPart, Field(discriminator="type")]
Content = str | Annotated[list[ContentPart], Field(min_length=1)]


class CalledFunction(Body):
    name: FunctionName
    arguments: str
    """An object, as JSON."""


class MadeCall(Repeated):
    """A call that an earlier reply made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class FromSystem(Body):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class FromUser(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class FromAssistant(Repeated):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[MadeCall] | None = None
    annotations: list[Any] | None = None
    """Sent back by clients that repeat a reply as they got it."""


class FromTool(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


ChatMessage = Annotated[FromSystem | FromUser | FromAssistant | FromTool, Field(discriminator="role")]


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class FunctionTool(Body):
    type: Literal["function"]
    function: Function


class FunctionNamed(Body):
    name: FunctionName


class NamedChoice(Body):
    type: Literal["function"]
    function: FunctionNamed


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedChoice]


class AllowedChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Choice | NamedChoice | AllowedChoice


class TextFormat(Body):
    type: Literal["text"]


class AnyJson(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Schema | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchema(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | AnyJson | JsonSchema, Field(discriminator="type")]


class ChatTalk(Body):
    """The keys of a body that say what the conversation is, and what its reply must be."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """For the template, such as ``enable_thinking``."""


def chat_asked(body: ChatTalk, talk: Talk) -> TalkAsked:
    """What ``body`` asks of ``talk``. WrongRequest for what a text model cannot read."""
    tools = tuple(Tool(t.function.name, t.function.description, t.function.parameters or _ANY_OBJECT) for t in body.tools or ())
    choice, named = _choice(body.tool_choice)
    return TalkAsked(
        messages=[_message(message, talk, f"messages.{k}") for k, message in enumerate(body.messages)],
        tools=distinct(tools),
        choice=known(choice, named, tools),
        named=named,
        parallel=body.parallel_tool_calls is not False,
        schema=_schema(body.response_format),
        options={**effort_options(body.reasoning_effort, talk), **(body.chat_template_kwargs or {})},
    )


def distinct(tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """``tools``; WrongRequest where two have one name, or one takes something else than an object."""
    names = [tool.name for tool in tools]
    if other := next((tool for tool in tools if tool.parameters.get("type", "object") != "object"), None):
        raise WrongRequest(
            f"tools: the parameters of {other.name!r} are of type {other.parameters['type']!r}; it must be 'object'", "tools"
        )
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise WrongRequest(f"tools: two are named {twice!r}; rename one", "tools")
    return tools


def known(choice: Choice, named: frozenset[str] | None, tools: Sequence[Tool]) -> Choice:
    """``choice``; WrongRequest where it asks for functions that ``tools`` lacks."""
    absent = sorted((named or frozenset()) - {tool.name for tool in tools})
    if absent:
        raise WrongRequest(f"tool_choice: {absent[0]!r} is none of tools; name one of those", "tool_choice")
    if choice == "required" and not tools:
        raise WrongRequest("tool_choice: a call is wanted, and there are no tools; give some, or leave tool_choice out", "tool_choice")
    return choice


def effort_options(effort: str | None, talk: Talk) -> dict[str, Any]:
    """What a template is told of how much to reason, in the words that it has; nothing where it has none."""
    if effort is None:
        return {}
    options: dict[str, Any] = {"reasoning_effort": effort} if talk.writes("reasoning_effort") and effort != "none" else {}
    return options | {name: effort != "none" for name in ("enable_thinking", "thinking") if talk.writes(name)}


def template_call(number: str, name: str, arguments: str, where: str) -> dict[str, Any]:
    """A call that was made, as chat templates take it. WrongRequest naming ``where`` for arguments that are no object."""
    try:
        said = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, Mapping):
        raise WrongRequest(f"{where}: the arguments of {name!r} are no JSON object; send them as they were received", where)
    return {"id": template_id(number), "type": "function", "function": {"name": name, "arguments": said}}


def template_id(number: str) -> str:
    """A call's id as templates take it."""
    ours = _OURS.match(number)
    return ours[1] if ours else number


def _message(message: FromSystem | FromUser | FromAssistant | FromTool, talk: Talk, where: str) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role, "content": _text(message.content, where)}
    if message.name is not None:
        said["name"] = message.name
    if message.role == "developer" and not talk.writes("developer"):
        said["role"] = "system"
    if isinstance(message, FromTool):
        said["tool_call_id"] = template_id(message.tool_call_id)
    if isinstance(message, FromAssistant):
        if reasoned := message.reasoning_content or message.reasoning:
            said[talk.reasoning_key] = reasoned
        if message.tool_calls:
            said["tool_calls"] = [
                template_call(c.id, c.function.name, c.function.arguments, f"{where}.tool_calls") for c in message.tool_calls
            ]
        elif message.content is None and not message.refusal:
            raise WrongRequest(f"{where}: an assistant's message has neither content nor tool_calls; give one of them", where)
        said["content"] = said["content"] or message.refusal or ""
    return said


def _text(content: str | Sequence[TextPart | RefusalPart | OtherPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if isinstance(part, OtherPart):
            raise WrongRequest(f"{where}: a part of type {part.type!r} cannot be read, this server reads text; leave it out", where)
    return lines(part.text if isinstance(part, TextPart) else part.refusal for part in content if not isinstance(part, OtherPart))


def _choice(said: Any) -> tuple[Choice, frozenset[str] | None]:
    if isinstance(said, NamedChoice):
        return "required", frozenset({said.function.name})
    if isinstance(said, AllowedChoice):
        return said.allowed_tools.mode, frozenset(tool.function.name for tool in said.allowed_tools.tools)
    return said or "auto", None


def _schema(said: TextFormat | AnyJson | JsonSchema | None) -> Mapping[str, Any] | bool | None:
    if said is None or isinstance(said, TextFormat):
        return None
    if isinstance(said, AnyJson):
        return _ANY_OBJECT
    return True if said.json_schema.schema_ is None else said.json_schema.schema_
