"""/v1/messages and /v1/messages/count_tokens: conversations in Anthropic's dialect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.runtime.serve.dialects.anthropic_bodies import AnthropicBody, AnthropicTalk, anthropic_asked
from penstock.runtime.serve.dialects.anthropic_events import PING, AnthropicReply, Event, anthropic_usage
from penstock.runtime.serve.dialects.model_talk import Prepared
from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.asking import Asking, Piece, Wanted
from penstock.runtime.serve.front.front_desk import Front, caller_of
from penstock.runtime.serve.front.sse import event, streamed, whole
from penstock.runtime.serve.wire.messages import Sampled


def router(front: Front) -> APIRouter:
    """The routes, for one server."""
    routes = APIRouter()

    async def prepared_of(body: AnthropicTalk, most: int | None) -> Prepared:
        front.check_model(body.model)
        return await front.beside(lambda: front.talk.prepare(anthropic_asked(body, front.talk), most))

    @routes.post("/v1/messages")
    async def messages(body: AnthropicBody, request: Request) -> Response:
        """Answer a conversation."""
        prepared = await prepared_of(body, front.most_prompt_tokens)
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
            return await streamed(front, asking, reply, _failed, event(PING, PING["type"]))
        return await whole(front, asking, reply)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: AnthropicTalk) -> dict[str, int]:
        """How many tokens the conversation is as a prompt."""
        return {"input_tokens": len((await prepared_of(body, None)).prompt)}

    return routes


_CONTEXT = "model_context_window_exceeded"


class _Reply:
    """What the engine says, as it is told."""

    def __init__(self, reply: AnthropicReply, prepared: Prepared, asking: Asking, at_length: str):
        self._reply, self._reader, self._asking, self._at_length = reply, prepared.reader(), asking, at_length
        self._reasoning_tokens = 0
        self._reason = "end_turn"
        self._stop: str | None = None

    def begin(self) -> bytes:
        """What comes before all else."""
        return _written(self._reply.begin(self._usage()))

    def add(self, number: int, piece: Piece) -> bytes:
        """Events of one piece."""
        return _written(self._heard(piece))

    def gather(self, number: int, piece: Piece) -> None:
        """The message grows by it."""
        for _ in self._heard(piece):
            pass

    def _heard(self, piece: Piece) -> Iterator[Event]:
        parts = self._reader.add(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            parts += self._reader.rest()
            self._stop = piece.stop
            ended = "stop_sequence" if self._stop is not None else "tool_use" if self._reader.called else "end_turn"
            self._reason = self._at_length if piece.finish_reason == "length" else ended
        yield from self._reply.add(parts)
        self._reasoning_tokens += len(piece.tokens) if self._reply.reasons else 0

    def end(self) -> bytes:
        """How it ended, and what it cost."""
        return _written(self._reply.end(self._reason, self._stop, self._usage()))

    def document(self) -> dict[str, Any]:
        """The whole message."""
        self.end()
        return self._reply.message

    def _usage(self) -> dict[str, Any]:
        usage = self._asking.usage
        return anthropic_usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, self._reasoning_tokens)


def _written(events: Iterable[Event]) -> bytes:
    return b"".join([event(said, said["type"]) for said in events])


def _failed(error: ApiError) -> bytes:
    return event(error.anthropic(), "error")
