"""Requests whose length may be read in two ways, as bytes, and what is answered to them."""

from __future__ import annotations

import asyncio
import json

from bench.sse import Address, read_lines


def smuggling(name: str) -> dict[str, bytes]:
    """Requests whose length may be read in two ways, with a second request where one of them ends. None may be answered well, or twice."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = json.dumps({"model": name, "prompt": "x", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    size = len(body)
    return {
        "two lengths": head + b"Content-Length: %d\r\nContent-Length: %d\r\n\r\n" % (size, size + len(hidden)) + body + hidden,
        "a list of lengths": head + b"Content-Length: %d, %d\r\n\r\n" % (size, size + len(hidden)) + body + hidden,
        "a signed length": head + b"Content-Length: +%d\r\n\r\n" % size + body + hidden,
        "a hexadecimal length": head + b"Content-Length: 0x%x\r\n\r\n" % size + body + hidden,
        "another coding": head + b"Transfer-Encoding: xchunked\r\nContent-Length: %d\r\n\r\n" % size + body + hidden,
        "a space before the colon": head + b"Transfer-Encoding : chunked\r\nContent-Length: %d\r\n\r\n" % size + b"0\r\n\r\n" + hidden,
        "a folded header": head + b"X: a\r\n Transfer-Encoding: chunked\r\nContent-Length : %d\r\n\r\n" % size + body + hidden,
        "a chunk of no size": head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body + b"\r\n0\r\n\r\n" + hidden,
        "a chunk that is too long": head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n" + body + b"\r\n0\r\n\r\n" + hidden,
        "a null byte": head + b"X: a\0b\r\nContent-Length: %d\r\n\r\n" % size + body + hidden,
    }  # fmt: skip


async def said_to(address: Address, sent: bytes, within_s: float = 15.0) -> list[int]:
    """The statuses of all that is answered to ``sent`` on one connection until it is closed or silent."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    statuses = []
    try:
        writer.write(sent)
        while True:
            first, head = await asyncio.wait_for(read_lines(reader), within_s)
            statuses.append(int(first.split(" ")[1]))
            await asyncio.wait_for(reader.readexactly(int(head.get("content-length", "0"))), within_s)
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
        return statuses
    finally:
        writer.close()
