"""/v1/messages and /v1/messages/count_tokens: conversations in Anthropic's dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.runtime.serve.dialects.anthropic_bodies import AnthropicBody, AnthropicTalk, anthropic_asked
from penstock.runtime.serve.dialects.anthropic_events import PING, AnthropicReply, Event, anthropic_usage
from penstock.runtime.serve.dialects.model_talk import Prepared
from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.asking import Asking, Wanted
from penstock.runtime.serve.front.front_desk import Front, caller_of
from penstock.runtime.serve.front.sse import event, streamed, whole
from penstock.runtime.serve.wire.messages import Sampled


def router(front: Front) -> APIRouter:
    """The routes, for one server."""
    routes = APIRouter()

    async def prepared_of(body: AnthropicTalk) -> Prepared:
        front.check_model(body.model)
        return await front.beside(lambda: front.talk.prepare(anthropic_asked(body, front.talk)))

    @routes.post("/v1/messages")
    async def messages(body: AnthropicBody, request: Request) -> Response:
        """Answer a conversation."""
        prepared = await prepared_of(body)
        # Anthropic's replies end where the context does, and say so; they are not refused beforehand.
        room = front.capacity_tokens - len(prepared.prompt)
        limit = min(body.max_tokens, room) if room > 0 else body.max_tokens
        wanted = Wanted(
            prompt=prepared.prompt,
            new_tokens=limit,
            sampling=Sampled(temperature=body.temperature, top_k=body.top_k, top_p=body.top_p, seed=body.seed),
            stops=tuple(body.stop_sequences or ()),
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            grammar=prepared.grammar,
            cache_salt=body.cache_salt or "",
            decode=prepared.decode,
        )
        asking = front.ask(wanted, caller_of(request))
        reply = _Reply(AnthropicReply(front.model), prepared, asking, "max_tokens" if limit == body.max_tokens else _CONTEXT)
        if body.stream:
            return await streamed(front, asking, reply.stream(), _failed, event(PING, PING["type"]))
        return await whole(front, asking, reply.document())

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: AnthropicTalk) -> dict[str, int]:
        """How many tokens the conversation is as a prompt."""
        return {"input_tokens": len((await prepared_of(body)).prompt)}

    return routes


_CONTEXT = "model_context_window_exceeded"


class _Reply:
    """What the engine says, as it is told."""

    def __init__(self, reply: AnthropicReply, prepared: Prepared, asking: Asking, at_length: str):
        self._reply, self._reader, self._asking, self._at_length = reply, prepared.reader(), asking, at_length
        self._reasoning_tokens = 0

    async def document(self) -> dict[str, Any]:
        """The whole message."""
        async for _ in self._events():
            pass
        return self._reply.message

    async def stream(self) -> AsyncIterator[bytes]:
        """The same in events."""
        async for said in self._events():
            yield event(said, said["type"])

    async def _events(self) -> AsyncIterator[Event]:
        for said in self._reply.begin(self._usage()):
            yield said
        reason, stop = "end_turn", None
        async for piece in self._asking:
            parts = self._reader.add(piece.text) if piece.text else []
            if piece.finish_reason is not None:
                parts += self._reader.rest()
                stop = piece.stop
                ended = "stop_sequence" if stop is not None else "tool_use" if self._reader.called else "end_turn"
                reason = self._at_length if piece.finish_reason == "length" else ended
            for said in self._reply.add(parts):
                yield said
            self._reasoning_tokens += len(piece.tokens) if self._reply.reasons else 0
        for said in self._reply.end(reason, stop, self._usage()):
            yield said

    def _usage(self) -> dict[str, Any]:
        usage = self._asking.usage
        return anthropic_usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, self._reasoning_tokens)


def _failed(error: ApiError) -> bytes:
    return event(error.anthropic(), "error")
