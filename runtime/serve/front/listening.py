"""The listening server: uvicorn's, with deadlines and limits for connections that it has not, and an end that drains."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from penstock.planner.common.interrupt import DEAF_S
from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.front_limits import FrontLimits
from penstock.runtime.serve.front.sse import AT_ONCE, as_json

HEADER_BYTES = 65536
"""Of a request's line and headers together."""
_READS = "_read_ready_cb"
"""Of asyncio's transports over selectors; None in them before there is a protocol."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Door:
    """Open connections, by address, the oldest first."""

    def __init__(self, limits: FrontLimits):
        self.limits = limits
        self._by_address: dict[str, dict[Connection, None]] = defaultdict(dict)

    @property
    def count(self) -> int:
        return sum(map(len, self._by_address.values()))

    def enter(self, one: Connection) -> bool:
        """Whether there is room for ``one``, be it in the place of a connection that asks nothing."""
        own = self._by_address[one.address]
        if len(own) >= self.limits.connections_per_address and not _part_with(own):
            return False
        if self.count >= self.limits.connections and not any(_part_with(some) for some in self._by_address.values()):
            return False
        own[one] = None
        return True

    def leave(self, one: Connection) -> None:
        own = self._by_address[one.address]
        own.pop(one, None)
        if not own:
            del self._by_address[one.address]


def _part_with(some: dict[Connection, None]) -> bool:
    """Close the oldest that asks nothing -> whether there was one."""
    silent = next((one for one in some if one.silent), None)
    if silent is None:
        return False
    some.pop(silent)
    silent.transport.abort()
    return True


class Connection(H11Protocol):
    """One connection. Ends where headers do not come, and where nothing is read."""

    def __init__(self, door: Door, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._door, self.address = door, ""
        self._app, self.app = self.app, self._answer
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the application does, which may write to the transport itself where replies come in chunks."""
        if scope["http_version"] == "1.1" and scope["method"] == "POST":
            scope["extensions"] = {AT_ONCE: partial(self._at_once, self.cycle)}
        try:
            await self._app(scope, receive, send)
        finally:
            scope.pop("extensions", None)  # no circle of connection, scope and this way: each request would wait for Python to find it

    def _at_once(self, cycle: RequestResponseCycle, data: bytes) -> bool:
        if self.flow.write_paused or cycle.disconnected:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))  # as h11 frames it, in a tenth of the time
        return True

    @property
    def silent(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self._door.enter(self):
            self._expect_headers()
        else:
            self._refuse(ApiError(503, "too many connections; close some", code="too_many_connections", retry_after_s=1))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.silent:
            self._forget_headers()
        elif self._headers_due is None and not self.transport.is_closing():
            self._expect_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.silent and self._headers_due is None and self.conn.trailing_data[0] and not self.transport.is_closing():
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        self._forget_headers()
        self._forget_reading()
        super().connection_lost(exc)
        self.app = self._app
        _release(self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_reading()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reading()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._expect_reading()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "not a request in HTTP/1.1, or headers of more than 64 KiB"))

    def _refuse(self, error: ApiError) -> None:
        """Answer before there is a request, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and (self.cycle is None or not self.cycle.response_started or self.silent):
            body = as_json(error.openai())
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            if error.retry_after_s is not None:
                headers.append(("retry-after", str(error.retry_after_s)))
            with contextlib.suppress(h11.LocalProtocolError):
                for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        self._expect_reading()

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(self._door.limits.headers_s, self._headers_late)

    def _forget_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _headers_late(self) -> None:
        self._headers_due = None
        self._refuse(ApiError(408, f"no headers within {self._door.limits.headers_s:g} s"))

    def _expect_reading(self) -> None:
        self._forget_reading()
        self._reading_due = self.loop.call_later(self._door.limits.stalled_s, self.transport.abort)

    def _forget_reading(self) -> None:
        if self._reading_due is not None:
            self._reading_due.cancel()
            self._reading_due = None


def _release(transport: asyncio.BaseTransport) -> None:
    """Cut the circle in which asyncio's transport, closed, still names its own method that reads. Until Python finds it each connection's
    objects would live on, scattered over memory that cannot be given back."""
    known = getattr(transport, "__dict__", {})
    if _READS in known:
        known[_READS] = None


class Listening(uvicorn.Server):
    """Serves ``app`` until a signal comes. Then it takes no connection any more, and ``drain`` says when those under way are over; another
    signal ends them by ``kill``, unless it comes with the first: a terminal and a supervisor may both send one."""

    def __init__(self, app: ASGIApp, door: Door, drain: Callable[[], Awaitable[None]], kill: Callable[[], None], drain_s: float):
        def connection(*args: Any, **more: Any) -> Connection:
            return Connection(door, *args, **more)

        config = uvicorn.Config(
            app,
            http=connection,  # type: ignore[arg-type]
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=True,
            proxy_headers=False,
            timeout_keep_alive=int(door.limits.idle_s),
            timeout_graceful_shutdown=int(drain_s) + 10,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        super().__init__(config)
        self._drain, self._kill = drain, kill
        self.came: int | None = None
        """The signal that ended it first."""
        self.cut: int | None = None
        """The one that ended what was under way."""
        self._came_at = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        usual = {number: signal.signal(number, self.handle_exit) for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN}
        try:
            yield
        finally:
            for number, handler in usual.items():
                signal.signal(number, handler)

    def leave(self) -> None:
        """As a signal does."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        now = time.monotonic()
        if self.came is None:
            self.came, self._came_at = sig, now
        elif now - self._came_at < DEAF_S:
            return
        else:
            self.cut = sig
        if self.should_exit:
            self.force_exit = True
            self._kill()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.ensure_future(self._drain())
        await super().shutdown(sockets)
        await draining
