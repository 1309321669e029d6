"""A reply as OpenAI's response object, and as the events that build it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from penstock.runtime.serve.dialects.call_ids import call_id, fresh_id
from penstock.runtime.serve.dialects.reply_reader import Called, Part, Reasoned
from penstock.runtime.serve.dialects.responses_bodies import ResponsesTalk

Event = dict[str, Any]
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class ResponsesReply:
    """One reply. Each method gives the events that it makes; ``response`` is what they have built so far."""

    def __init__(self, body: ResponsesTalk, model: str, sampled: Mapping[str, Any]):
        self.response: dict[str, Any] = _head(body, model) | dict(sampled)
        self._number = -1
        self._open: dict[str, Any] | None = None
        """The item that grows."""

    def begin(self) -> Iterator[Event]:
        """Before all else."""
        yield self._event("response.created", response=self._now())
        yield self._event("response.in_progress", response=self._now())

    def add(self, parts: Iterable[Part], logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Event]:
        """What one piece of the reply brings; ``logprobs`` are of its tokens."""
        for part in parts:
            if isinstance(part, Called):
                yield from self._close("completed")
                yield from self._call(part)
                continue
            kind = "reasoning" if isinstance(part, Reasoned) else "message"
            if self._open is None or self._open["type"] != kind:
                yield from self._close("completed")
                yield from self._begin(kind)
            yield from self._grow(part.text, logprobs)
            logprobs = ()

    def end(self, reason: str, usage: Mapping[str, Any]) -> Iterator[Event]:
        """``reason`` is ``stop`` or ``length``."""
        if self._open is None and not self.response["output"]:
            yield from self._begin("message")
        status: Literal["completed", "incomplete"] = "completed" if reason == "stop" else "incomplete"
        yield from self._close(status)
        self.response |= {"status": status, "usage": dict(usage), "completed_at": int(time.time()) if reason == "stop" else None}
        self.response["incomplete_details"] = None if reason == "stop" else {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self._now())

    def fail(self, code: str, message: str) -> Event:
        """The last event of a reply that cannot be ended."""
        self.response |= {"status": "failed", "error": {"code": code, "message": message}}
        return self._event("response.failed", response=self._now())

    @property
    def reasons(self) -> bool:
        """Whether what grows is reasoning."""
        return self._open is not None and self._open["type"] == "reasoning"

    def _begin(self, kind: str) -> Iterator[Event]:
        item: dict[str, Any] = {
            "id": fresh_id("rs" if kind == "reasoning" else "msg"),
            "type": kind,
            "status": "in_progress",
            "content": [],
        }
        own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        item |= own
        self.response["output"].append(item)
        self._open = item
        yield self._event("response.output_item.added", output_index=self._at, item=_copy(item))
        part: dict[str, Any] = {"type": _PARTS[kind], "text": ""} | ({} if kind == "reasoning" else {"annotations": [], "logprobs": []})
        item["content"].append(part)
        yield self._event("response.content_part.added", **self._place, part=_copy(part))

    def _grow(self, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if self.reasons:
            yield self._event("response.reasoning_text.delta", **self._place, delta=text)
        else:
            part["logprobs"] += logprobs
            yield self._event("response.output_text.delta", **self._place, delta=text, logprobs=list(logprobs))

    def _close(self, status: str) -> Iterator[Event]:
        if (item := self._open) is None:
            return
        part = item["content"][0]
        if self.reasons:
            yield self._event("response.reasoning_text.done", **self._place, text=part["text"])
        else:
            yield self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **self._place, part=_copy(part))
        item["status"] = status
        yield self._event("response.output_item.done", output_index=self._at, item=_copy(item))
        self._open = None

    def _call(self, part: Called) -> Iterator[Event]:
        item = {"id": fresh_id("fc"), "type": "function_call", "status": "in_progress", "call_id": call_id(), "name": part.name}
        self.response["output"].append(item)
        place = {"item_id": item["id"], "output_index": self._at}
        yield self._event("response.output_item.added", output_index=self._at, item=item | {"arguments": ""})
        yield self._event("response.function_call_arguments.delta", **place, delta=part.arguments)
        item |= {"arguments": part.arguments, "status": "completed"}
        yield self._event("response.function_call_arguments.done", **place, name=part.name, arguments=part.arguments)
        yield self._event("response.output_item.done", output_index=self._at, item=dict(item))

    @property
    def _at(self) -> int:
        return len(self.response["output"]) - 1

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.response["output"][-1]["id"], "output_index": self._at, "content_index": 0}

    def _now(self) -> dict[str, Any]:
        return self.response | {"output": [_copy(item) for item in self.response["output"]]}

    def _event(self, kind: str, **said: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **said}


def responses_usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int) -> dict[str, Any]:
    """As OpenAI writes it."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _copy(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: [_copy(one) if isinstance(one, Mapping) else one for one in value] if isinstance(value, list) else value
        for key, value in said.items()
    }


def _head(body: ResponsesTalk, model: str) -> dict[str, Any]:
    form = {"type": "text"} if body.text is None or body.text.format is None else body.text.format.model_dump(by_alias=True)
    if form["type"] == "json_schema":
        form |= {"strict": True}
    choice = "auto" if body.tool_choice is None else body.tool_choice
    tools = [
        {"type": "function", "name": t.name, "description": t.description, "parameters": t.parameters, "strict": t.strict}
        for t in body.tools or ()
    ]
    asked = body.reasoning
    return {
        "id": fresh_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "previous_response_id": None,
        "instructions": body.instructions,
        "output": [],
        "tools": tools,
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "max_tool_calls": body.max_tool_calls,
        "text": {"format": form, "verbosity": (None if body.text is None else body.text.verbosity) or "medium"},
        "reasoning": {"effort": None if asked is None else asked.effort, "summary": None if asked is None else asked.summary},
        "truncation": "disabled",
        "top_logprobs": body.top_logprobs or 0,
        "usage": None,
        "max_output_tokens": body.max_output_tokens,
        "store": False,
        "background": False,
        "service_tier": "default",
        "metadata": body.metadata or {},
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }
