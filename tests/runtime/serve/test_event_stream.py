"""Events go out in the order in which they were made, whichever way each one goes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.asking import Piece
from penstock.runtime.serve.front.front_limits import FrontLimits
from penstock.runtime.serve.front.sse import AT_ONCE, EventStream, Mould, event, openai_error


class Telling:
    """A piece's text is its event."""

    def begin(self) -> bytes:
        return b""

    def add(self, number: int, piece: Piece) -> bytes:
        return piece.text.encode()

    def end(self) -> bytes:
        return b"."


class Asked:
    """A request that says nothing by itself."""

    at = None

    def listen(self, number: int, hearer: Any) -> None:
        pass

    def close(self) -> None:
        pass


def test_what_comes_while_another_event_waits_for_room_does_not_overtake_it() -> None:
    out: list[bytes] = []
    room = [True]

    def write(chunk: bytes) -> bool:
        if room[0]:
            out.append(chunk)
        return room[0]

    async def scenario() -> None:
        going = asyncio.Event()

        async def send(message: Any) -> None:
            if message.get("body") == b"b":
                await going.wait()
            out.append(message.get("body", b""))

        observed: list[float] = []
        front = SimpleNamespace(limits=FrontLimits(), meters=SimpleNamespace(to_socket=SimpleNamespace(observe=observed.append)))
        stream = EventStream(cast(Any, front), [cast(Any, Asked())], Telling(), openai_error, b"")
        running = asyncio.create_task(stream({"type": "http", "extensions": {AT_ONCE: write}}, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        stream.piece(0, Piece(0, "a"))
        room[0] = False
        stream.piece(0, Piece(0, "b"))
        await asyncio.sleep(0.01)
        room[0] = True
        stream.piece(0, Piece(0, "c"))
        going.set()
        await asyncio.sleep(0.01)
        stream.piece(0, Piece(0, "d"))
        stream.ended(0, None)
        await running

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert out == [b"", b"a", b"b", b"c", b"d", b".", b""]


def test_a_fault_ends_a_stream_behind_what_was_made_before() -> None:
    """Of two of one moment the first counts."""
    out: list[bytes] = []

    async def scenario() -> None:
        async def send(message: Any) -> None:
            out.append(message.get("body", b""))

        stream = EventStream(cast(Any, SimpleNamespace(limits=FrontLimits())), [cast(Any, Asked())] * 2, Telling(), openai_error, b"")
        running = asyncio.create_task(stream({"type": "http"}, asyncio.Event().wait, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        stream.piece(0, Piece(0, "a"))
        stream.ended(0, ApiError(503, "gone"))
        stream.ended(1, ApiError(500, "later"))
        stream.piece(1, Piece(0, "b"))
        await running

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert out == [b"", b"a", openai_error(ApiError(503, "gone"))]


def test_an_event_from_a_mould_is_what_its_data_would_be() -> None:
    head = {"id": "a%s", "model": 'm"\u2028%', "choices": [{"index": 0, "logprobs": None}]}
    for text in ("", "%d", 'a "b"\n\\', "\u2028é\x00", Mould.TEXT):
        assert Mould(head | {"text": Mould.TEXT}).event(text) == event(head | {"text": text})
