"""What front and motor say arrives as it was said, whatever the socket does to it."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from penstock.runtime.serve.wire.frames import LENGTH, MOST_BYTES, AsyncFrames, BadFrame, Frames
from penstock.runtime.serve.wire.messages import (
    Cancel,
    Chosen,
    Drain,
    EngineInfo,
    Open,
    Over,
    Pass,
    Ready,
    Refused,
    Sampled,
    Submit,
    heard,
    said,
    together,
)

SAID = [
    Open("plan.yaml", kv={"dir": None}),
    Submit(1, [5, 6], 3, Sampled(temperature=0.5, logit_bias={7: -1.5}), [2], grammar='{"a": "ü"}', salt="k", n=2),
    Cancel(1),
    Pass([Chosen(1, 0, [9], None, 0.5), Chosen(2, 1, [9, 10])]),
    Refused(1, "too_long", "no"),
    Ready(EngineInfo("m", "/c", 10, 64, {"rows": 2}, {"tokens_per_s": 1.0}, 0.5, "1")),
    Drain(),
]


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


@pytest.mark.parametrize("message", SAID, ids=lambda message: type(message).__name__)
def test_a_message_is_heard_as_it_was_said(ends: tuple[socket.socket, socket.socket], message: object) -> None:
    Frames(ends[0]).send(said(message))
    found = heard(Frames(ends[1]).receive())
    assert type(found) is type(message) and said(found).keys() == said(message).keys()
    assert found == message


def test_frames_that_arrive_byte_by_byte_are_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    body = b'{"a":1}'
    thread = threading.Thread(target=lambda: [ends[0].sendall(bytes([one])) for one in (LENGTH.pack(len(body)) + body) * 2])
    thread.start()
    assert [Frames(ends[1]).receive(), Frames(ends[1]).receive()] == [{"a": 1}] * 2
    thread.join()


def test_a_closed_end_is_heard_also_in_the_middle_of_a_frame(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(LENGTH.pack(100) + b"{")
    ends[0].close()
    assert Frames(ends[1]).receive() is None


@pytest.mark.parametrize("sent", [LENGTH.pack(MOST_BYTES + 1), LENGTH.pack(2) + b"[]", LENGTH.pack(1) + b"{"])
def test_what_is_no_frame_is_refused(ends: tuple[socket.socket, socket.socket], sent: bytes) -> None:
    ends[0].sendall(sent)
    with pytest.raises(BadFrame):
        Frames(ends[1]).receive()


def test_a_message_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="not a message"):
        heard({"said": "Submit", "id": 1, "prompt": [], "new_tokens": 1, "beams": 4})


def test_asyncio_hears_and_says_the_same(ends: tuple[socket.socket, socket.socket]) -> None:
    async def both() -> list[object]:
        frames = await AsyncFrames.over(ends[1])
        await frames.send(said(Drain()), said(Cancel(3, 1)))
        found = [heard(Frames(ends[0]).receive()), heard(Frames(ends[0]).receive())]
        Frames(ends[0]).send(said(SAID[1]))
        found.append(heard(await frames.receive()))
        ends[0].close()
        found.append(await frames.receive())
        frames.close()
        return found

    assert asyncio.run(both()) == [Drain(), Cancel(3, 1), SAID[1], None]


def test_what_a_pass_gives_is_one_message_before_the_replies_that_end_with_it() -> None:
    first, second, third = (
        Chosen(1, 0, [7], [(-0.5, [], [])], 1.0),
        Chosen(2, 0, [8], None, 1.5),
        Chosen(1, 0, [9], [(-1.0, [], [])], 2.0),
    )
    over = Over(1, 0, "length")
    assert together([first, second, third, over]) == [
        Pass([Chosen(1, 0, [7, 9], [(-0.5, [], []), (-1.0, [], [])], 1.0), Chosen(2, 0, [8], None, 1.5)]), over
    ]  # fmt: skip
    assert together([over]) == [over]
