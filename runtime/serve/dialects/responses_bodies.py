"""The body of OpenAI's /v1/responses, as far as a server that keeps nothing answers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from penstock.runtime.serve.dialects.bodies import Body, Refused, RefusedTrue, Repeated, at_most, lines
from penstock.runtime.serve.dialects.chat_bodies import (
    AnyJson,
    Effort,
    FunctionName,
    Schema,
    TextFormat,
    distinct,
    effort_options,
    known,
    template_call,
    template_id,
)
from penstock.runtime.serve.dialects.model_talk import Talk
from penstock.runtime.serve.dialects.talk_asked import Choice, TalkAsked, Tool
from penstock.runtime.serve.dialects.wrong_request import WrongRequest

LOGPROBS = "message.output_text.logprobs"
_ANY_OBJECT = {"type": "object"}
_STATELESS = "this server keeps nothing between requests; send the whole conversation as input"
_Status = Literal["in_progress", "completed", "incomplete"]


class TextIn(Repeated):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalIn(Repeated):
    type: Literal["refusal"]
    refusal: str


class OtherIn(Body):
    """What this server cannot read; it is refused in words."""

    model_config = {**Body.model_config, "extra": "allow"}
    type: Literal["input_image", "input_file", "input_audio", "input_video"]


_Part = Annotated[TextIn | RefusalIn | OtherIn, Field(discriminator="type")]


class MessageItem(Repeated):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Repeated):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    id: str | None = None
    status: _Status | None = None


class ResultItem(Repeated):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_Part]
    id: str | None = None
    status: _Status | None = None


class ReasoningItem(Repeated):
    type: Literal["reasoning"]
    summary: list[TextIn] = Field(default_factory=list)
    content: list[TextIn] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: _Status | None = None


class ReferenceItem(Body):
    """Of something kept; it is refused in words."""

    type: Literal["item_reference"]
    id: str


def _kind(said: Any) -> str:
    return str((said.get("type") if isinstance(said, Mapping) else getattr(said, "type", None)) or "message")


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_kind),
]


class FunctionToolItem(Repeated):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextAsked(Body):
    format: Annotated[TextFormat | AnyJson | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningAsked(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesTalk(Body):
    """The keys of a body that say what the conversation is, what its reply must be, and how it would be kept."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[FunctionToolItem], Field(max_length=128)] | None = None
    tool_choice: Choice | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=1)
    """Of tools that a server has itself, and this one has none; taken, and of no effect."""
    text: TextAsked | None = None
    reasoning: ReasoningAsked | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Reasoning is told as it is; nothing is encrypted."""
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]] | None, at_most(16)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    store: RefusedTrue = None
    background: RefusedTrue = None
    previous_response_id: Refused = None
    conversation: Refused = None
    prompt: Refused = None

    @property
    def likeliest(self) -> int | None:
        """Tokens told beside each one; None: no logprobs."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) or self.top_logprobs else None


def responses_asked(body: ResponsesTalk, talk: Talk) -> TalkAsked:
    """What ``body`` asks of ``talk``. WrongRequest for what would have to be kept, and for what a text model cannot read."""
    kept = {
        "store": body.store or None,
        "previous_response_id": body.previous_response_id,
        "conversation": body.conversation,
        "prompt": body.prompt,
    }
    if wrong := next((name for name, value in kept.items() if value is not None), None):
        raise WrongRequest(f"{wrong}: {_STATELESS}, and leave {wrong} out", wrong, "unsupported_parameter")
    if body.background:
        raise WrongRequest(
            "background: nobody could fetch the reply later; say stream=true, or wait for it", "background", "unsupported_parameter"
        )
    tools = tuple(Tool(t.name, t.description, t.parameters or _ANY_OBJECT) for t in body.tools or ())
    choice, named = _choice(body.tool_choice)
    return TalkAsked(
        messages=_messages(body, talk),
        tools=distinct(tools),
        choice=known(choice, named, tools),
        named=named,
        parallel=body.parallel_tool_calls is not False,
        schema=_schema(body.text),
        schema_key="text.format",
        options={
            **effort_options(None if body.reasoning is None else body.reasoning.effort, talk),
            **_verbosity(body.text, talk),
            **(body.chat_template_kwargs or {}),
        },
    )


def _messages(body: ResponsesTalk, talk: Talk) -> list[dict[str, Any]]:
    """Items of one reply become one message; what leads as instruction becomes one message, too."""
    said: list[dict[str, Any]] = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for k, item in enumerate(items):
        where = f"input.{k}"
        if isinstance(item, ReferenceItem):
            raise WrongRequest(f"{where}: item {item.id[:80]!r} is not kept here; {_STATELESS}", where, "unsupported_parameter")
        if isinstance(item, ResultItem):
            said.append({"role": "tool", "tool_call_id": template_id(item.call_id), "content": _text(item.output, where)})
        elif isinstance(item, ReasoningItem):
            texts = lines(part.text for part in item.content or item.summary)
            _reply(said, new="content" in (said[-1] if said else {}) and said[-1]["role"] == "assistant")[talk.reasoning_key] = texts
        elif isinstance(item, CallItem):
            _reply(said).setdefault("tool_calls", []).append(template_call(item.call_id, item.name, item.arguments, where))
        elif item.role == "assistant":
            reply = _reply(said)
            reply["content"] = lines([*filter(None, [reply.get("content")]), _text(item.content, where)])
        else:
            role = "system" if item.role == "developer" and not talk.writes("developer") else item.role
            if said and len(said) == 1 and {role, said[0]["role"]} <= {"system", "developer"}:
                said[0]["content"] = lines([said[0]["content"], _text(item.content, where)])
            else:
                said.append({"role": role, "content": _text(item.content, where)})
    return [{"content": "", **message} for message in said]


def _reply(said: list[dict[str, Any]], new: bool = False) -> dict[str, Any]:
    """The model's message that items go on with, or a ``new`` one."""
    if new or not said or said[-1]["role"] != "assistant":
        said.append({"role": "assistant"})
    return said[-1]


def _text(content: str | Sequence[TextIn | RefusalIn | OtherIn], where: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if isinstance(part, OtherIn):
            raise WrongRequest(f"{where}: a part of type {part.type!r} cannot be read, this server reads text; leave it out", where)
    return lines(part.text if isinstance(part, TextIn) else part.refusal for part in content if not isinstance(part, OtherIn))


def _choice(said: Any) -> tuple[Choice, frozenset[str] | None]:
    if isinstance(said, NamedFunction):
        return "required", frozenset({said.name})
    if isinstance(said, AllowedFunctions):
        return said.mode, frozenset(tool.name for tool in said.tools)
    return said or "auto", None


def _schema(said: TextAsked | None) -> Mapping[str, Any] | None:
    form = None if said is None else said.format
    if form is None or isinstance(form, TextFormat):
        return None
    return _ANY_OBJECT if isinstance(form, AnyJson) else form.schema_


def _verbosity(said: TextAsked | None, talk: Talk) -> dict[str, Any]:
    if said is None or said.verbosity in (None, "medium"):
        return {}
    if not talk.writes("verbosity"):
        raise WrongRequest("text.verbosity: this model's chat template has no such word; leave it out", "text.verbosity")
    return {"verbosity": said.verbosity}
