"""Replies as streams of events and as one JSON document; either gives its requests up when the client goes."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.runtime.serve.front.api_errors import ApiError, fault
from penstock.runtime.serve.front.asking import Asking, Piece
from penstock.runtime.serve.front.front_desk import Front

QUIET = b": still at work\n\n"
"""A comment, which clients pass over."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
MANY_ROWS = 1000
"""Prompt logprobs from which on a document is written beside the event loop, so that streams go on."""
DONE = b"data: [DONE]\n\n"
AT_ONCE = "penstock.at_once"
"""ASGI extension: ``(bytes) -> bool`` writes them as more of the reply's body, where its client has read most of what came before; else
False."""


class Mould:
    """The bytes of one event but for a text: ``data`` has ``Mould.TEXT`` in its place."""

    TEXT = f"text of {uuid.uuid4().hex}"

    def __init__(self, data: Any):
        before, after = event(data).split(as_json(self.TEXT))
        self._form = before.replace(b"%", b"%%") + b"%b" + after.replace(b"%", b"%%")

    def event(self, text: str) -> bytes:
        """The event with ``text``, as :func:`event` writes it."""
        return self._form % encode_basestring(text).encode()


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


class Telling(Protocol):
    """What a dialect makes of a reply as it comes, in bytes of events."""

    def begin(self) -> bytes: ...
    def add(self, number: int, piece: Piece) -> bytes:
        """Of a piece of the request ``number``; may be empty."""

    def end(self) -> bytes: ...


class Gathering(Protocol):
    """What a dialect makes of a reply once it is whole."""

    def gather(self, number: int, piece: Piece) -> None: ...
    def document(self) -> Any:
        """To be sent as JSON."""


async def streamed(
    front: Front,
    asking: Asking | Sequence[Asking],
    telling: Telling,
    error: Callable[[ApiError], bytes] = openai_error,
    quiet: bytes = QUIET,
) -> Response:
    """Events that ``telling`` makes of what ``asking`` says, as it comes; ``quiet`` where nothing comes for a while, ``error`` makes the
    last one of what goes wrong on the way. ApiError where the engine refuses right away."""
    asked = await _settled(front, asking)
    return EventStream(front, asked, telling, error, quiet)


async def whole(front: Front, asking: Asking | Sequence[Asking], gathering: Gathering) -> Response:
    """The JSON document that ``gathering`` makes of what ``asking`` says. ApiError where the engine refuses or fails."""
    return Document(await _settled(front, asking), gathering)


class EventStream(Response):
    """Server-sent events. Each is written where the engine's word is heard, while the client reads as fast as they come; what it has not
    room for waits for it."""

    def __init__(self, front: Front, asked: Sequence[Asking], telling: Telling, error: Callable[[ApiError], bytes], quiet: bytes):
        self.status_code, self.background = 200, None
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._front, self._asked, self._telling, self._error, self._quiet = front, asked, telling, error, quiet
        self._sent_at = time.monotonic()
        self._write: Callable[[bytes], bool] = _later
        self._waiting = bytearray()
        self._known_at: float | None = None
        """When the engine knew the oldest token that waits."""
        self._sending = False
        self._left = len(asked)
        self._failed: Exception | None = None
        self._wake = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        helpers = [asyncio.create_task(_watch(receive, self._asked)), asyncio.create_task(self._keep_awake())]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            self._write = scope.get("extensions", {}).get(AT_ONCE, _later)
            self._put(self._telling.begin())
            for number, asking in enumerate(self._asked):
                asking.listen(number, self)
            while self._waiting or (self._left and self._failed is None):
                await self._wake.wait()
                self._wake.clear()
                await self._send_waiting(send)
            helpers[1].cancel()
            last = b"" if self._failed is None else self._error(self._failed if isinstance(self._failed, ApiError) else fault())
            await send({"type": "http.response.body", "body": last})
            if self._failed is not None and not isinstance(self._failed, ApiError):
                raise self._failed
        finally:
            for helper in helpers:
                helper.cancel()
            for asking in self._asked:
                asking.close()

    def piece(self, number: int, piece: Piece) -> None:
        """See :class:`Hearer`."""
        if self._failed is not None:
            return
        asking = self._asked[number]
        chunk = self._telling.add(number, piece)
        if chunk:
            self._known_at = self._known_at or asking.at
            asking.at = None
            self._put(chunk)

    def ended(self, number: int, error: Exception | None) -> None:
        """See :class:`Hearer`."""
        self._left -= 1
        if error is None and not self._left and self._failed is None:
            try:
                self._put(self._telling.end())
            except Exception as fault_:
                error = fault_
        self._failed = self._failed or error
        if not self._left or self._failed is not None:
            self._wake.set()

    def _put(self, chunk: bytes) -> None:
        if not chunk:  # an empty one would end the reply
            return
        if not self._waiting and not self._sending and self._write(chunk):
            self._sent()
        else:
            self._waiting += chunk
            self._wake.set()

    async def _send_waiting(self, send: Send) -> None:
        while self._waiting:
            chunk, self._sending = bytes(self._waiting), True
            self._waiting.clear()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._sending = False
            self._sent()

    def _sent(self) -> None:
        self._sent_at = time.monotonic()
        if self._known_at is not None:
            self._front.meters.to_socket.observe(self._sent_at - self._known_at)
            self._known_at = None

    async def _keep_awake(self) -> None:
        quiet_s = self._front.limits.quiet_s
        while True:
            await asyncio.sleep(max(0.01, self._sent_at + quiet_s - time.monotonic()))
            if time.monotonic() - self._sent_at >= quiet_s:
                self._sent_at = time.monotonic()
                self._put(self._quiet)


class Document(Response):
    """A reply that is sent once it is whole."""

    def __init__(self, asked: Sequence[Asking], gathering: Gathering):
        super().__init__(media_type="application/json")
        self._asked, self._gathering = asked, gathering
        self._left = len(asked)
        self._failed: Exception | None = None
        self._over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(_watch(receive, self._asked))
        try:
            for number, asking in enumerate(self._asked):
                asking.listen(number, self)
            await self._over.wait()
            if self._failed is not None:
                error, self._failed = self._failed, None
                try:
                    raise error
                finally:
                    del error  # else it and its traceback would hold each other
            made = self._gathering.document()
            large = any(len(asking.prompt_rows) > MANY_ROWS for asking in self._asked)
            body = await asyncio.to_thread(as_json, made) if large else as_json(made)
        finally:
            watching.cancel()
            for asking in self._asked:
                asking.close()
        await Response(body, media_type="application/json")(scope, receive, send)

    def piece(self, number: int, piece: Piece) -> None:
        """See :class:`Hearer`."""
        self._gathering.gather(number, piece)

    def ended(self, number: int, error: Exception | None) -> None:
        """See :class:`Hearer`."""
        self._left -= 1
        self._failed = self._failed or error
        if error is not None or not self._left:
            self._over.set()


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
        asking.hear(ApiError(499, "the client has gone", code="client_gone"))


def _later(chunk: bytes) -> bool:
    """Nothing is written at once where the server does not say how."""
    return False
