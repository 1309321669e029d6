"""/v1/responses: one reply, of which nothing is kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.runtime.serve.dialects.model_talk import Prepared
from penstock.runtime.serve.dialects.reply_reader import Said
from penstock.runtime.serve.dialects.responses_bodies import ResponsesTalk, responses_asked
from penstock.runtime.serve.dialects.responses_events import Event, ResponsesReply, responses_usage
from penstock.runtime.serve.front.api_errors import ApiError, wrong
from penstock.runtime.serve.front.asking import Asking, Piece, Wanted
from penstock.runtime.serve.front.front_desk import Front, caller_of
from penstock.runtime.serve.front.sse import event, streamed, whole
from penstock.runtime.serve.front.token_texts import TokenTexts
from penstock.runtime.serve.routes.sampling_body import SamplingBody


class ResponsesBody(ResponsesTalk, SamplingBody):
    """What is asked of /v1/responses."""


def router(front: Front) -> APIRouter:
    """The route, for one server."""
    routes, texts = APIRouter(), front.texts

    @routes.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation."""
        body.check(front)
        if (body.n or 1) > 1:
            raise wrong("n", f"{body.n} replies; a response has one")
        sampled, stops = body.sampled(front), body.stops()
        longest = front.most_prompt_tokens
        prepared = await front.beside(lambda: front.talk.prepare(responses_asked(body, front.talk), longest))
        wanted = Wanted(
            prompt=prepared.prompt,
            new_tokens=body.max_output_tokens,
            sampling=sampled,
            stops=stops,
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            logprobs=body.likeliest,
            grammar=prepared.grammar,
            cache_salt=body.cache_salt or "",
            decode=prepared.decode,
        )
        asking = front.ask(wanted, caller_of(request))
        reply = _Reply(ResponsesReply(body, front.model, body.in_force(front)), prepared, asking, texts)
        if body.stream:
            return await streamed(front, asking, reply, reply.failed)
        return await whole(front, asking, reply)

    return routes


class _Reply:
    """What the engine says, as it is told."""

    def __init__(self, reply: ResponsesReply, prepared: Prepared, asking: Asking, texts: TokenTexts):
        self._reply, self._reader, self._asking, self._texts = reply, prepared.reader(), asking, texts
        self._reasoning_tokens = 0
        self._reason = "stop"
        self._held: list[dict[str, Any]] = []
        """Logprobs of tokens whose text has not come yet."""

    def begin(self) -> bytes:
        """What comes before all else."""
        return _written(self._reply.begin())

    def add(self, number: int, piece: Piece) -> bytes:
        """Events of one piece."""
        return _written(self._heard(piece))

    def gather(self, number: int, piece: Piece) -> None:
        """The response grows by it."""
        for _ in self._heard(piece):
            pass

    def _heard(self, piece: Piece) -> Iterator[Event]:
        parts = self._reader.add(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            parts += self._reader.rest()
            self._reason = piece.finish_reason
        if piece.logprobs is not None:
            self._held += self._texts.logprobs(piece.tokens, piece.logprobs)
        logprobs, self._held = (self._held, []) if parts else ([], self._held)
        yield from self._reply.add(parts, logprobs if any(isinstance(part, Said) for part in parts) else ())
        self._reasoning_tokens += len(piece.tokens) if self._reply.reasons else 0

    def end(self) -> bytes:
        """How it ended, and what it cost."""
        usage = self._asking.usage
        told = responses_usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, self._reasoning_tokens)
        return _written(self._reply.end(self._reason, told))

    def document(self) -> dict[str, Any]:
        """The whole response."""
        self.end()
        return self._reply.response

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that went wrong."""
        said = self._reply.fail(error.code or "server_error", error.message)
        return event(said, said["type"])


def _written(events: Iterable[Event]) -> bytes:
    return b"".join([event(said, said["type"]) for said in events])
