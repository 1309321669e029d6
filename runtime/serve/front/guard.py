"""What every request passes first: its host, its key, its body's size and time. And what becomes of one that fails."""

from __future__ import annotations

import asyncio
import json
import re
import traceback
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.runtime.serve.front.api_errors import ApiError, fault
from penstock.runtime.serve.front.front_desk import Front

OPEN = ("/", "/health", "/ready", "/favicon.ico")
"""Paths that want no key, and all below /page/. They tell nothing but how far loading is."""
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]", "::1", ""})
ANTHROPIC = "/v1/messages"
"""Below it errors have Anthropic's shape."""
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character beyond 16 bits, as JSON escapes it."""

CLOSED = "two_lengths"
"""An error behind which nothing of its connection is read: a proxy in front may have read another request there."""


class Guard:
    """ASGI around ``app``. ``local_only``: other names of this machine are refused, so that no web page reaches a server without keys by
    a name that it points here."""

    def __init__(self, app: ASGIApp, front: Front, local_only: bool, tell: Callable[[str], None]):
        self._app, self._front, self._local_only, self._tell = app, front, local_only, tell

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, whole = 0, False

        async def sending(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                whole = not message.get("more_body", False)
            await send(message)

        try:
            headers = Headers(scope=scope)
            if "content-length" in headers and "transfer-encoding" in headers:
                raise ApiError(400, "two lengths of one body: Content-Length and Transfer-Encoding; send one", code=CLOSED)
            self._check_host(headers)
            scope.setdefault("state", {})["caller"] = self._caller(scope["path"], headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                receive = _replayed(await self._body(headers, receive), receive)
            await self._app(scope, receive, sending)
        except ApiError as error:
            if not status:
                await error_response(scope["path"], error)(scope, receive, sending)
        except Exception as error:
            self._tell(_where(error))
            if not status:
                await error_response(scope["path"], fault())(scope, receive, sending)
            elif not whole:
                raise Cut from None
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._front.meters.requests.labels(route, str(status or 499)).inc()

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self._local_only and name.lower() not in LOCAL_HOSTS:
            raise ApiError(403, "this server answers to localhost alone; start it with auth=none or with keys to be reached by other names")

    def _caller(self, path: str, headers: Headers) -> object:
        given = headers.get("x-api-key")
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if given is None and scheme.lower() == "bearer":
            given = token.strip()
        caller = self._front.keys.caller(given)
        if caller is None and path not in OPEN and not path.startswith("/page/"):
            what = "no API key was given" if given is None else "the API key is wrong"
            raise ApiError(401, f"{what}; send one as: Authorization: Bearer KEY", code="invalid_api_key")
        return caller

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole of it. ApiError 413 for one that is too large, 408 for one that does not come."""
        limits = self._front.limits
        too_large = ApiError(413, f"the body has more than {limits.body_bytes} bytes; send less", code="request_too_large")
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > limits.body_bytes:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(499, "the client has gone")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limits.body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return _text(b"".join(parts))
        except TimeoutError:
            raise ApiError(408, f"the body has not come within {limits.body_s:g} s") from None


class Cut(Exception):
    """A reply that had begun ends here; the connection is closed, and what was wrong is told already."""


def error_response(path: str, error: ApiError) -> Response:
    """The documented error object. Where not all of the body was read the connection ends with it."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if error.status in (408, 413, 499) or error.code == CLOSED:
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = error.anthropic() if path.startswith(ANTHROPIC) else error.openai(path)
    return JSONResponse(body, error.status, headers)


def _text(body: bytes) -> bytes:
    """``body``. ApiError for one whose escapes write half a character, which is no text and cannot be read as tokens."""
    if _HALF.search(body):
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(400, "the body has a lone surrogate, which is no character; leave it out", code="invalid_json") from None
        except (ValueError, RecursionError):
            pass  # whoever reads the body says what is wrong
    return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    """``body``, then what comes behind it: that the client has gone."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _where(error: BaseException) -> str:
    """The type of an exception and where it was raised. Its message may hold a request's text, and is not told."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    return f"fault: {type(error).__name__} at " + " < ".join(
        f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in reversed(frames)
    )
