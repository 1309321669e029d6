"""One request over a raw socket: HTTP/1.1 and server-sent events, with nothing between the bytes and the clock but asyncio."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from penstock.planner.common.errors import UserError

READ_BYTES = 65536
DONE = "[DONE]"


@dataclass(frozen=True)
class Address:
    """Of a server, and the key that it wants."""

    host: str
    port: int
    key: str | None = None

    @staticmethod
    def of(url: str, key: str | None = None) -> Address:
        """UserError for what is no http address."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UserError(f"url={url}: must be an address such as http://127.0.0.1:8000")
        return Address(parts.hostname, parts.port or 80, key)

    def head(self, method: str, path: str, body: bytes, keep: bool = False) -> bytes:
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        said = f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}Connection: {'keep-alive' if keep else 'close'}\r\n"
        return (said + f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n").encode()


@dataclass
class Reply:
    """What came back of one request. Times are of ``time.perf_counter``."""

    begun_s: float
    """Before the request was sent, and a connection opened where it needs one."""
    status: int = 0
    """0: the connection ended before there was one."""
    head: dict[str, str] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    """When each event that carried text arrived."""
    text: str = ""
    tokens: int = 0
    """Of the reply, by the server's own usage; events where it sent none."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish: str | None = None
    error: str | None = None
    whole: bool = False
    """The reply came to an end of its own: a finish reason and, of a stream, its last event; or an error object."""
    ended_s: float = 0.0
    document: dict[str, Any] | None = None
    """Of a reply that was no stream."""

    @property
    def ttft_s(self) -> float:
        """Until the first event with text."""
        return self.times_s[0] - self.begun_s

    @property
    def between_s(self) -> float:
        """The mean from one token to the next; 0 of a single one."""
        return (self.times_s[-1] - self.times_s[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def answered(self) -> bool:
        return self.whole and self.error is None and self.status == 200

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """One object: of a stream, or a whole reply."""
        if event.get("error"):
            self.error, self.whole = str(event["error"].get("message", event["error"])), True
            return
        for choice in event.get("choices") or ():
            said = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or said.get("content") or said.get("reasoning_content") or ""
            if text:
                self.times_s.append(now)
                self.text += text
            self.finish = choice.get("finish_reason") or self.finish
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def read_lines(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """First line and headers, their names in lower case. IncompleteReadError where the connection ends first."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return first, {name.lower(): value.strip() for name, _, value in pairs}


async def read_body(reader: asyncio.StreamReader, head: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body's bytes as they arrive, whichever way its end is told. IncompleteReadError where it ends before."""
    if head.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readuntil(b"\r\n")
    elif "content-length" in head:
        if size := int(head["content-length"]):
            yield await reader.readexactly(size)
    else:
        while data := await reader.read(READ_BYTES):
            yield data


async def events(body: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event; comments, which keep a connection alive, are left out."""
    held = b""
    async for data in body:
        *blocks, held = (held + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for block in blocks:
            lines = [line[5:].strip() for line in block.decode().split("\n") if line.startswith("data:")]
            if lines:
                yield "\n".join(lines)


class Kept:
    """A connection that is kept from one request of a client to its next."""

    def __init__(self) -> None:
        self._both: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def open(self) -> bool:
        return self._both is not None

    async def opened(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._both = self._both or await asyncio.open_connection(address.host, address.port)
        return self._both

    def close(self) -> None:
        if self._both is not None:
            self._both[1].close()
            self._both = None


async def ask(
    address: Address, path: str, body: Mapping[str, Any], method: str = "POST", kept: Kept | None = None, reply: Reply | None = None
) -> Reply:
    """Send ``body`` and read the reply to its end, on a connection of its own unless one is ``kept``. What goes wrong with it is the
    reply's ``error``. Whoever gives a ``reply`` sees it fill."""
    content = json.dumps(body).encode() if method == "POST" else b""
    reply, used = reply or Reply(time.perf_counter()), kept or Kept()
    try:
        for again in (used.open, False):
            try:
                reader, writer = await used.opened(address)
                writer.write(address.head(method, path, content, kept is not None) + content)
                await writer.drain()
                await receive(reader, reply)
                break
            except (ConnectionError, asyncio.IncompleteReadError):
                used.close()
                if not again or reply.status:  # a server may close what was kept, at the moment in which it is used
                    raise
    except (OSError, asyncio.IncompleteReadError) as error:
        reply.error = reply.error or f"{type(error).__name__}: {error}"
    finally:
        reply.ended_s = time.perf_counter()
        if kept is None or not reply.whole or reply.head.get("connection", "").lower() == "close":
            used.close()
    reply.tokens = reply.tokens or len(reply.times_s)
    return reply


async def receive(reader: asyncio.StreamReader, reply: Reply) -> None:
    """Fill ``reply`` with what comes on a connection until the reply's end."""
    first, reply.head = await read_lines(reader)
    reply.status = int(first.split(" ", 2)[1])
    body = read_body(reader, reply.head)
    if not reply.head.get("content-type", "").startswith("text/event-stream"):
        whole = b"".join([data async for data in body])
        reply.document = json.loads(whole) if whole else {}
        reply.take(reply.document, time.perf_counter())
        reply.whole = True
        return
    async for data in events(body):
        if data == DONE:
            reply.whole = True
            continue
        reply.take(json.loads(data), time.perf_counter())


async def fetch(address: Address, path: str) -> tuple[int, bytes]:
    """GET ``path`` -> status and body. OSError or IncompleteReadError where no one answers."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        writer.write(address.head("GET", path, b""))
        first, head = await read_lines(reader)
        return int(first.split(" ", 2)[1]), b"".join([data async for data in read_body(reader, head)])
    finally:
        writer.close()
