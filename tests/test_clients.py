"""bench/clients.py and what it is made of, at a server whose figures are known."""

from __future__ import annotations

import asyncio

import pytest

from bench.clients import COMPLETIONS, Figures, Spread, arriving, body_of, closed_loop, poisson, steady
from bench.paced_server import Paced
from bench.sse import Address, Reply, receive

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'1f\r\ndata: {"choices":[{"text":"one"\r\n20;x=y\r\n}]}\r\n\r\n: still at it\r\n\r\ndata: {"\r\n45\r\n'
    b'choices":[{"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n       \r\n0\r\n\r\n'
)


async def received(data: bytes, cuts: int) -> Reply:
    """The reply of ``data`` when it comes in pieces of ``cuts`` bytes."""
    reader, reply = asyncio.StreamReader(), Reply(0.0)

    async def feed() -> None:
        for at in range(0, len(data), cuts):
            reader.feed_data(data[at : at + cuts])
            await asyncio.sleep(0)
        reader.feed_eof()

    await asyncio.gather(feed(), receive(reader, reply))
    return reply


@pytest.mark.parametrize("cuts", [1, 7, 1000])
def test_a_stream_is_read_alike_however_it_is_cut(cuts: int) -> None:
    reply = asyncio.run(received(STREAM, cuts))
    assert (reply.text, reply.finish, len(reply.times_s), reply.answered) == ("one", "stop", 1, True)


def test_a_stream_that_breaks_off_is_no_answer() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        asyncio.run(received(STREAM[:-90], 1000))


def test_clients_measure_no_less_than_the_server_waits_and_count_what_it_refuses() -> None:
    async def load() -> tuple[list[Reply], list[Reply]]:
        bodies = [body_of(COMPLETIONS, [1, 2], 4, "paced") for _ in range(8)]
        async with Paced(0.02, 0.005, refuse_every=4).listening() as port:
            address = Address("127.0.0.1", port)
            return await closed_loop(address, COMPLETIONS, bodies, 3), await arriving(address, COMPLETIONS, bodies, poisson(500, 8, 0))

    for replies in asyncio.run(load()):
        figures = Figures.of(replies, 3)
        assert (figures.requests, figures.failed, figures.tokens, figures.errors) == (8, 2, 24, ("the queue is full",))
        assert figures.ttft_s.p50 > 0.019 and figures.whole_s.p50 > 0.034, "0.02 s, and three times 0.005"


def test_a_server_that_is_not_there_fails_each_request() -> None:
    async def load() -> list[Reply]:
        async with Paced(0, 0).listening() as port:
            pass
        return await closed_loop(Address("127.0.0.1", port), COMPLETIONS, [body_of(COMPLETIONS, "a", 1, "m")] * 2, 1)

    assert Figures.of(asyncio.run(load())).failed == 2


def test_figures_are_those_of_the_formulas() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 4.0, 5.0])
    assert (spread.mean, spread.p50, spread.p90, spread.p99) == pytest.approx((3.0, 3.0, 4.6, 4.96))
    assert poisson(2.0, 2000, 1) == poisson(2.0, 2000, 1)
    assert 2000 / poisson(2.0, 2000, 1)[-1] == pytest.approx(2.0, rel=0.1)


def test_a_steady_rate_counts_while_every_client_asks() -> None:
    def reply(begun: float) -> Reply:
        return Reply(begun, 200, times_s=[begun + k + 1 for k in range(4)], tokens=4, finish="length", whole=True, ended_s=begun + 4)

    assert steady([reply(0.0), reply(0.0), reply(4.0), reply(4.0)], 2) == pytest.approx(2 * 7 / 7)
    assert steady([reply(0.0)], 1) is None
    assert reply(0.0).between_s == 1.0
