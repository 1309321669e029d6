"""Streams that bench/serve.py leaves before they end, against a played server, which gives every row tokens until it goes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from bench.serve_streams import LeftEarly, climb, first_tokens, gap_between
from bench.sse import Address

PATH = "/v1/completions"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


class Played:
    """Its rows, by what each asked for: how many tokens each was told, and how many rows were there when one came."""

    def __init__(self) -> None:
        self.told: dict[str, int] = {}
        self.joined: list[tuple[str, dict[str, int]]] = []
        self.gone: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        asked = json.loads(await reader.readexactly(length))
        name = asked["prompt"]
        if name == "wrong":
            said = b'{"error": {"message": "no"}}'
            writer.write(b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))
            writer.close()
            return
        self.joined.append((name, dict(self.told)))
        self.told[name] = 0
        writer.write(HEAD)
        with suppress(ConnectionError):
            while self.told[name] < asked["max_tokens"] and not writer.is_closing() and not reader.at_eof():
                await asyncio.sleep(0.01)
                self.told[name] += 1
                writer.write(b"data: " + json.dumps({"choices": [{"text": "x"}]}).encode() + b"\n\n")
                await writer.drain()
            if self.told[name] == asked["max_tokens"]:
                writer.write(b"data: [DONE]\n\n")
        self.gone.append(name)
        writer.close()


@asynccontextmanager
async def played() -> AsyncIterator[tuple[Played, Address]]:
    one = Played()
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    try:
        yield one, Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


def run(of: Callable[[Played, Address], Coroutine[Any, Any, Any]]) -> tuple[Any, Played]:
    async def all_of_it() -> tuple[Any, Played]:
        async with played() as (one, address):
            found = await of(one, address)
            for _ in range(200):
                if len(one.gone) == len(one.told):
                    break
                await asyncio.sleep(0.01)
            return found, one

    return asyncio.run(all_of_it())


def bodies(count: int, tokens: int = 10_000) -> list[dict[str, Any]]:
    return [{"prompt": str(k), "max_tokens": tokens} for k in range(count)]


def test_rows_join_when_the_newest_were_told_their_steps_and_all_are_left_at_the_end() -> None:
    stairs, server = run(lambda _, address: climb(address, PATH, bodies(8), (1, 2, 8), 4))
    assert [stair.rows for stair in stairs] == [1, 2, 8] and all(stair.gap_s > 0 for stair in stairs)
    joined = dict(server.joined)
    assert joined["0"] == {} and joined["1"]["0"] >= 5 and all(joined[str(k)]["1"] >= 5 for k in range(2, 8))
    assert sorted(server.gone) == sorted(server.told) and max(server.told.values()) < 10_000


def test_a_row_that_ends_before_the_last_joins_is_an_error() -> None:
    with pytest.raises(LeftEarly, match="ended before"):
        run(lambda _, address: climb(address, PATH, bodies(2, tokens=6), (1, 2), 5))


def test_a_refused_row_is_an_error() -> None:
    with pytest.raises(LeftEarly, match="status 400: no"):
        run(lambda _, address: climb(address, PATH, [*bodies(1), {"prompt": "wrong", "max_tokens": 3}], (1, 2), 2))


def test_requests_come_at_their_times_and_are_left_behind_the_last_first_token() -> None:
    replies, server = run(lambda _, address: first_tokens(address, PATH, bodies(5), [0.0, 0.02, 0.04, 0.06, 0.08]))
    assert [reply.begun_s - replies[0].begun_s for reply in replies] == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08])
    assert all(reply.ttft_s > 0 for reply in replies) and not any(reply.error for reply in replies)
    assert sorted(server.gone) == sorted(server.told) and len(server.told) == 5 and max(server.told.values()) < 10_000


def test_a_gap_is_the_median_of_each_rows_mean_within_the_time() -> None:
    rows = [[0.0, 1.0, 2.0, 3.0, 9.0], [1.0, 3.0], [1.0, 1.5, 2.0], [2.0]]
    assert gap_between(rows, 1.0, 3.0) == pytest.approx(1.0)
    with pytest.raises(LeftEarly, match="two tokens"):
        gap_between(rows, 3.5, 8.0)
