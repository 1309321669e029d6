"""Replies as streams of events and as one JSON document; either gives its requests up when the client goes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.runtime.serve.front.api_errors import ApiError, fault
from penstock.runtime.serve.front.asking import Asking
from penstock.runtime.serve.front.front_desk import Front

QUIET = b": still at work\n\n"
"""A comment, which clients pass over."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
MANY_ROWS = 1000
"""Prompt logprobs from which on a document is written beside the event loop, so that streams go on."""
DONE = b"data: [DONE]\n\n"


def as_json(data: Any) -> bytes:
    """In few bytes; characters stay as they are."""
    return _ENCODER.encode(data).encode()


def event(data: Any, name: str | None = None) -> bytes:
    """One event of a stream."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return b"%sdata: %s\n\n" % (head, as_json(data))


def openai_error(error: ApiError) -> bytes:
    """How OpenAI's streams end that went wrong."""
    return event(error.openai()) + DONE


async def streamed(
    front: Front,
    asking: Asking | Sequence[Asking],
    events: AsyncIterator[bytes],
    error: Callable[[ApiError], bytes] = openai_error,
    quiet: bytes = QUIET,
) -> Response:
    """``events``, made of what ``asking`` says, as they come; ``quiet`` where none comes for a while, ``error`` makes the last one of what
    goes wrong on the way. ApiError where the engine refuses right away."""
    asked = await _settled(front, asking)
    return EventStream(front, asked, events, error, quiet)


async def whole(front: Front, asking: Asking | Sequence[Asking], make: Awaitable[Any]) -> Response:
    """The JSON document that ``make`` makes of what ``asking`` says. ApiError where the engine refuses or fails."""
    try:
        asked = await _settled(front, asking)
    except BaseException:
        _never(make)
        raise
    return Document(asked, make)


class EventStream(Response):
    """Server-sent events."""

    def __init__(
        self, front: Front, asked: Sequence[Asking], events: AsyncIterator[bytes], error: Callable[[ApiError], bytes], quiet: bytes
    ):
        self.status_code, self.background = 200, None
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._front, self._asked, self._events, self._error, self._quiet = front, asked, events, error, quiet
        self._sent_at = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failed: Exception | None = None
        helpers = [asyncio.create_task(_watch(receive, self._asked)), asyncio.create_task(self._keep_awake(send))]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for chunk in self._events:
                    await self._send(send, chunk)
            except ApiError as error:
                await self._send(send, self._error(error))
            except Exception as error:
                failed = error
                await self._send(send, self._error(fault()))
            helpers[1].cancel()
            await send({"type": "http.response.body", "body": b""})
            if failed is not None:
                raise failed
        finally:
            for helper in helpers:
                helper.cancel()
            for asking in self._asked:
                asking.close()
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()

    async def _send(self, send: Send, chunk: bytes) -> None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._sent_at = time.monotonic()
        for asking in self._asked:
            if asking.at is not None:
                self._front.meters.to_socket.observe(self._sent_at - asking.at)
                asking.at = None

    async def _keep_awake(self, send: Send) -> None:
        quiet_s = self._front.limits.quiet_s
        while True:
            await asyncio.sleep(max(0.01, self._sent_at + quiet_s - time.monotonic()))
            if time.monotonic() - self._sent_at >= quiet_s:
                self._sent_at = time.monotonic()
                await send({"type": "http.response.body", "body": self._quiet, "more_body": True})


class Document(Response):
    """A reply that is sent once it is whole."""

    def __init__(self, asked: Sequence[Asking], make: Awaitable[Any]):
        super().__init__(media_type="application/json")
        self._asked, self._make = asked, make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(_watch(receive, self._asked))
        try:
            made = await self._make
            large = any(len(asking.prompt_rows) > MANY_ROWS for asking in self._asked)
            body = await asyncio.to_thread(as_json, made) if large else as_json(made)
        finally:
            watching.cancel()
            for asking in self._asked:
                asking.close()
        await Response(body, media_type="application/json")(scope, receive, send)


async def _settled(front: Front, asking: Asking | Sequence[Asking]) -> Sequence[Asking]:
    """Closes all where one is refused."""
    asked = [asking] if isinstance(asking, Asking) else asking
    try:
        until = time.monotonic() + front.limits.quiet_s
        for each in asked:
            await each.settled(max(0.0, until - time.monotonic()))
    except BaseException:
        for each in asked:
            each.close()
        raise
    return asked


async def _watch(receive: Receive, asked: Sequence[Asking]) -> None:
    """End the requests of a client that has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    for asking in asked:
        asking.give_up(ApiError(499, "the client has gone", code="client_gone"))


def _never(make: Awaitable[Any]) -> None:
    """What is not awaited after all is closed."""
    with suppress(AttributeError):
        make.close()  # type: ignore[attr-defined]
