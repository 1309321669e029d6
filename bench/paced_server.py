"""A server whose figures are known: each reply's first token after `first_s`, one more every `between_s`. Clients are held to it.

python bench/paced_server.py port=8001 first_s=0.2 between_s=0.02
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of  # noqa: E402
from bench.sse import read_body, read_lines  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402

MODELS = {"object": "list", "data": [{"id": "paced", "object": "model", "created": 0, "owned_by": "bench"}]}


@dataclass(frozen=True)
class Paced:
    """Seconds until a reply's first token, and from each token to the next."""

    first_s: float
    between_s: float
    refuse_every: int = 0
    """Each so many-th request is refused; 0: none is."""

    @asynccontextmanager
    async def listening(self, port: int = 0) -> AsyncIterator[int]:
        """Its port; 0 takes any."""
        asked = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            try:
                while True:
                    first, head = await read_lines(reader)
                    body = b"".join([data async for data in read_body(reader, head)]) if "content-length" in head else b""
                    asked += first.startswith("POST")
                    refused = self.refuse_every and first.startswith("POST") and asked % self.refuse_every == 0
                    await self._answer(writer, first.split(" ")[1], body, bool(refused))
                    if head.get("connection", "").lower() == "close":
                        return
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", port)
        async with server:
            yield server.sockets[0].getsockname()[1]

    async def _answer(self, writer: asyncio.StreamWriter, path: str, body: bytes, refused: bool) -> None:
        if not body:
            return _whole(writer, 200, MODELS if path.endswith("models") else {"status": "ok"})
        asked = json.loads(body)
        if refused:
            return _whole(writer, 429, {"error": {"message": "the queue is full", "type": "queue", "param": None, "code": "queue_full"}})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        clock = asyncio.get_running_loop().time
        kind = {"id": "p", "model": "paced", "object": "chat.completion.chunk" if "chat" in path else "text_completion"}
        due, tokens = clock() + self.first_s, int(asked.get("max_tokens") or asked.get("max_completion_tokens") or 16)
        for k in range(tokens):
            await asyncio.sleep(due - clock())
            due += self.between_s
            piece = {"delta": {"content": f" w{k}"}} if "chat" in path else {"text": f" w{k}"}
            finish = "length" if k + 1 == tokens else None
            _event(writer, kind | {"choices": [{"index": 0, **piece, "finish_reason": finish}]})
            await writer.drain()
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
        _event(writer, kind | {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _event(writer: asyncio.StreamWriter, event: Mapping[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps(event)}\n\n".encode())


def _whole(writer: asyncio.StreamWriter, status: int, what: Mapping[str, Any]) -> None:
    body = json.dumps(what).encode()
    writer.write(f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


async def serve(port: int, paced: Paced) -> None:
    async with paced.listening(port) as found:
        print(f"listening on http://127.0.0.1:{found}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    try:
        given = given_of(sys.argv[1:], ("port", "first_s", "between_s"))
    except UserError as error:
        raise SystemExit(str(error)) from None
    asyncio.run(serve(int(given.get("port", "8001")), Paced(float(given.get("first_s", "0.2")), float(given.get("between_s", "0.02")))))


if __name__ == "__main__":
    main()
