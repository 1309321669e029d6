"""/v1/chat/completions: the next message of a conversation, in OpenAI's dialect."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.runtime.serve.dialects.bodies import RefusedTrue
from penstock.runtime.serve.dialects.call_ids import call_id
from penstock.runtime.serve.dialects.chat_bodies import ChatTalk, chat_asked
from penstock.runtime.serve.dialects.model_talk import Prepared
from penstock.runtime.serve.dialects.reply_reader import Called, Part, Reasoned, Said
from penstock.runtime.serve.front.api_errors import wrong
from penstock.runtime.serve.front.asking import Asking, Piece, Wanted
from penstock.runtime.serve.front.front_desk import Front, caller_of
from penstock.runtime.serve.front.sse import DONE, Mould, event, streamed, whole
from penstock.runtime.serve.front.token_texts import TokenTexts
from penstock.runtime.serve.routes.sampling_body import SamplingBody, usage_of


class ChatBody(ChatTalk, SamplingBody):
    """What is asked of /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    """An older name of it."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    store: RefusedTrue = None

    def limit(self) -> int | None:
        """Tokens of a reply, at most; None: as the context has room."""
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise wrong("max_tokens", f"{self.max_tokens} contradicts max_completion_tokens={self.max_completion_tokens}; give one of them")
        return self.max_completion_tokens or self.max_tokens

    def likeliest(self) -> int | None:
        """Tokens told beside each one; None: no logprobs."""
        if self.top_logprobs and not self.logprobs:
            raise wrong("top_logprobs", "only with logprobs=true; say so, or leave it out")
        return (self.top_logprobs or 0) if self.logprobs else None


def router(front: Front) -> APIRouter:
    """The route, for one server."""
    routes, texts = APIRouter(), front.texts

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        body.check(front)
        if body.store:
            raise wrong("store", "this server keeps nothing between requests; leave it out", "unsupported_parameter")
        limit, likeliest, stops, sampled = body.limit(), body.likeliest(), body.stops(), body.sampled(front)
        longest = front.most_prompt_tokens
        prepared = await front.beside(lambda: front.talk.prepare(chat_asked(body, front.talk), longest))
        wanted = Wanted(
            prompt=prepared.prompt,
            new_tokens=limit,
            sampling=sampled,
            stops=stops,
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            logprobs=likeliest,
            grammar=prepared.grammar,
            cache_salt=body.cache_salt or "",
            n=body.n or 1,
            decode=prepared.decode,
        )
        asking = front.ask(wanted, caller_of(request))
        reply = _Reply(front.model, body, texts, prepared, asking)
        return await (streamed(front, asking, reply) if body.stream else whole(front, asking, _Whole(reply)))

    return routes


class _Reply:
    """One answer of n choices."""

    def __init__(self, model: str, body: ChatBody, texts: TokenTexts, prepared: Prepared, asking: Asking):
        self._body, self._texts, self._asking = body, texts, asking
        self._readers = [prepared.reader() for _ in range(body.n or 1)]
        self.head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._moulds: dict[int, Mould] = {}
        """Of each choice that has begun: an event that says more of the answer, and nothing else."""

    def begin(self) -> bytes:
        """Nothing: the first piece of each choice says who speaks."""
        return b""

    def add(self, number: int, piece: Piece) -> bytes:
        """Events of one piece."""
        index, said = piece.index, []
        if index not in self._moulds:
            said.append(self._chunk(index, {"role": "assistant", "content": ""}))
            self._moulds[index] = Mould(self._data(index, {"content": Mould.TEXT}))
        parts, logprobs, reason = self.parts(piece), self.logprobs(piece), self.reason(piece)
        for part in parts:
            if isinstance(part, Said) and not logprobs and not self._body.counts_on:
                said.append(self._moulds[index].event(part.text))
            else:
                said.append(self._chunk(index, _delta(part), logprobs))
            logprobs = None
        if logprobs:
            said.append(self._chunk(index, {"content": ""}, logprobs))
        if reason is not None:
            said.append(self._chunk(index, {}, reason=reason))
        return b"".join(said)

    def end(self) -> bytes:
        """What the reply cost, where it is asked, and that it is over."""
        if not self._body.with_usage:
            return DONE
        return event(self.head | {"object": "chat.completion.chunk", "choices": [], "usage": self.usage()}) + DONE

    def parts(self, piece: Piece) -> list[Part]:
        reader = self._readers[piece.index]
        parts = reader.add(piece.text) if piece.text else []
        return parts if piece.finish_reason is None else [*parts, *reader.rest()]

    def reason(self, piece: Piece) -> str | None:
        """Asked behind :meth:`parts`."""
        called = piece.finish_reason == "stop" and self._readers[piece.index].called
        return "tool_calls" if called else piece.finish_reason

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, reason: str | None = None) -> bytes:
        return event(self._data(index, delta, logprobs, reason))

    def _data(
        self, index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        said = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": logprobs, "refusal": None} if logprobs else None,
            "finish_reason": reason,
        }
        return self.head | {"object": "chat.completion.chunk", "choices": [said]} | self._body.usage_so_far(self.usage)

    def logprobs(self, piece: Piece) -> list[dict[str, Any]] | None:
        if not self._body.logprobs:
            return None
        return self._texts.logprobs(piece.tokens, piece.logprobs or [])

    def usage(self) -> dict[str, Any]:
        usage = self._asking.usage
        return usage_of(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def choices(self) -> list[_Choice]:
        """One for each reply, empty."""
        return [_Choice(index, self._body.logprobs) for index in range(len(self._readers))]


class _Whole:
    """The same as one document."""

    def __init__(self, reply: _Reply):
        self._reply, self._choices = reply, reply.choices()

    def gather(self, number: int, piece: Piece) -> None:
        reply = self._reply
        self._choices[piece.index].add(reply.parts(piece), reply.logprobs(piece), reply.reason(piece))

    def document(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [choice.document() for choice in self._choices]
        return self._reply.head | {"object": "chat.completion", "choices": choices, "usage": self._reply.usage()}


class _Choice:
    """One message as it grows."""

    def __init__(self, index: int, with_logprobs: bool | None):
        self._index, self._said, self._reasoned, self._reason = index, "", "", "length"
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] | None = [] if with_logprobs else None

    def add(self, parts: Iterable[Part], logprobs: list[dict[str, Any]] | None, reason: str | None) -> None:
        """What one piece brings."""
        for part in parts:
            match part:
                case Said(text):
                    self._said += text
                case Reasoned(text):
                    self._reasoned += text
                case Called():
                    self._calls.append(_call(part))
        if self._logprobs is not None:
            self._logprobs += logprobs or []
        self._reason = reason or self._reason

    def document(self) -> dict[str, Any]:
        """As the answer has it."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not self._said else self._said,
            "refusal": None,
            "annotations": [],
        }
        if self._reasoned:
            message["reasoning_content"] = self._reasoned
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._reason}


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Said(text):
            return {"content": text}
        case Reasoned(text):
            return {"reasoning_content": text}
        case Called(number):
            return {"tool_calls": [{"index": number} | _call(part)]}


def _call(part: Called) -> dict[str, Any]:
    return {"id": call_id(), "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
