"""Connections of a real socket: those that say nothing, too much or read nothing, and the end of a server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.interrupt import noted
from penstock.runtime.serve.front.callers import Keys
from penstock.runtime.serve.front.front_limits import FrontLimits
from penstock.runtime.serve.front.listen_address import bound
from penstock.runtime.serve.front.served_as import Served, tell
from penstock.runtime.serve.front.supervise import Supervisor
from penstock.runtime.serve.routes.serving import serve_on
from penstock.runtime.serve.wire.messages import Failed, Open, Refused
from tests.runtime.serve.fake_motor import FakeMotor, Script, vocabulary

ASKED = json.dumps({"model": "model", "prompt": "a", "stream": True, "max_tokens": 400}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
REQUEST = POST + b"content-length: %d\r\n\r\n" % len(ASKED) + ASKED


@dataclass
class Served_:
    """A server that a test talks to."""

    port: int
    task: asyncio.Task[dict[str, Any]]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def said(self, sent: bytes, close: bool = False) -> bytes:
        """What comes back until the connection ends."""
        reader, writer = await self.connect()
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            if close:
                writer.write_eof()
            answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := await reader.read(65536):
                answer += part
        writer.close()
        return answer


@contextlib.asynccontextmanager
async def serving(script: Script, drain_s: float = 10.0, **limits: Any) -> AsyncIterator[Served_]:
    async def start() -> FakeMotor:
        return FakeMotor(script)

    sock = bound("127.0.0.1", 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    served = Served("model", limits=FrontLimits(**limits), drain_s=drain_s)
    task = asyncio.create_task(serve_on(sock, served, vocabulary(), Keys(()), Supervisor(start, Open("plan.yaml"), tell)))
    one = Served_(sock.getsockname()[1], task)
    try:
        with contextlib.suppress(ConnectionError):
            while b" 200 " not in await one.said(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"):
                await asyncio.sleep(0.01)
        yield one
    finally:
        for event in (script.begin, script.go_on):
            if event is not None:
                event.set()
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(UserError):
            await task


def run(scenario: Any) -> Any:
    return asyncio.run(asyncio.wait_for(scenario, 60))


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nhost:", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET "])
def test_a_connection_whose_headers_do_not_come_is_closed(begun: bytes) -> None:
    async def scenario() -> bytes:
        async with serving(Script(), headers_s=0.2) as one:
            return await one.said(begun)

    answer = run(scenario())
    assert b" 408 " in answer and answer.count(b"HTTP/1.1 200") == begun.count(b"/health")


def test_a_body_that_does_not_come_is_a_408() -> None:
    async def scenario() -> bytes:
        async with serving(Script(), body_s=0.2) as one:
            return await one.said(POST + b"content-length: 100\r\n\r\n{")

    answer = run(scenario())
    assert b" 408 " in answer and b'"type":"invalid_request_error"' in answer


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nx: " + b"a" * 1_000_000, b"GET / HTTP/1.1\r\nhost: a\r\nhost : b\r\n\r\n",
     POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
     POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n",
     POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n"],
    ids=["tls", "headers", "space", "lengths", "smuggled", "chunk"],
)  # fmt: skip
def test_what_is_no_request_is_refused_and_nothing_behind_it_is_read(sent: bytes) -> None:
    async def scenario() -> tuple[bytes, bytes]:
        async with serving(Script()) as one:
            return await one.said(sent), await one.said(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")

    answer, later = run(scenario())
    assert not answer or (answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"content-length") == 1)
    assert later.startswith(b"HTTP/1.1 200 ")


def test_connections_that_say_nothing_make_way_for_one_that_asks() -> None:
    async def scenario() -> tuple[bytes, int]:
        async with serving(Script(), connections_per_address=8) as one:
            silent = [await one.connect() for _ in range(40)]
            answer = await one.said(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            closed = 0
            for reader, writer in silent:
                with contextlib.suppress(TimeoutError, ConnectionError):
                    closed += await asyncio.wait_for(reader.read(), 0.01) == b""
                writer.close()
            return answer, closed

    answer, closed = run(scenario())
    assert answer.startswith(b"HTTP/1.1 200 ") and closed >= 20


def test_a_new_connection_is_refused_where_all_others_ask() -> None:
    script = Script(begin=asyncio.Event())

    async def scenario() -> bytes:
        async with serving(script, connections_per_address=2) as one:
            asking = [asyncio.create_task(one.said(REQUEST, close=False)) for _ in range(2)]
            while len(script.submitted) < 2:
                await asyncio.sleep(0.001)
            refused = await one.said(b"GET /health HTTP/1.1\r\n")
            for task in asking:
                task.cancel()
            return refused

    assert b" 503 " in run(scenario())


def test_a_client_that_never_reads_is_cut_off() -> None:
    script = Script(reply=lambda submit: [65] * 100_000)

    async def scenario() -> None:
        async with serving(script, stalled_s=0.2) as one:
            many = json.dumps({"model": "model", "prompt": "a", "stream": True, "n": 16, "max_tokens": 200, "logprobs": 2}).encode()
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", one.port))
                sock.sendall(POST + b"content-length: %d\r\n\r\n" % len(many) + many)
                while not script.submitted or b"\npenstock_connections 1.0" not in await one.said(METRICS):
                    await asyncio.sleep(0.05)
            assert b"\npenstock_open_requests 0.0" in await one.said(METRICS)

    run(scenario())


def test_a_slow_reader_gets_every_event_whole_and_in_order() -> None:
    """What its connection has no room for waits; what comes meanwhile does not overtake it."""
    said = [32 + k % 90 for k in range(400)]

    async def scenario() -> bytes:
        async with serving(Script(reply=lambda submit: said)) as one:
            body = json.dumps({"model": "model", "prompt": "a", "stream": True, "max_tokens": 400, "logprobs": 2}).encode()
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", one.port))
                sock.setblocking(False)
                sock.sendall(POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
                read = b""
                while part := await reader.read(2000):
                    read += part
                    await asyncio.sleep(0.002)
                return read

    chunks = run(scenario()).partition(b"\r\n\r\n")[2]
    body = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        assert rest[int(size, 16) :][:2] == b"\r\n"
        body, chunks = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    assert len(body) > 65536, "as much as a connection keeps"
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == bytes(said).decode()


def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    async def scenario() -> bytes:
        async with serving(Script()) as one:
            return await one.said(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))

    head, _, body = run(scenario()).partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "hello"


KINDS = {
    "stream": REQUEST,
    "document": POST + b"content-length: 30\r\n\r\n" + b'{"model":"model","prompt":"a"}',
    "no JSON": POST + b"content-length: 1\r\n\r\n{",
    "another model": POST + b"content-length: 26\r\n\r\n" + b'{"model":"m","prompt":"a"}',
    "refused": POST + b"content-length: 30\r\n\r\n" + b'{"model":"model","prompt":"b"}',
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_an_answered_request_waits_for_the_collector(kind: str) -> None:
    """What holds itself in a circle stays until Python looks for it, thousands of requests later: memory that seems to grow."""

    names = ("Asking", "Connection", "RequestResponseCycle", "Request", "_SelectorSocketTransport")

    def alive() -> int:
        return sum(type(one).__name__ in names for one in gc.get_objects())

    def talk(port: int, sent: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as sock:  # no transport of asyncio's on this side
            sock.sendall(sent)
            return b"".join(iter(lambda: sock.recv(65536), b""))

    script = Script(instead=lambda submit: Refused(submit.id, "bad_sampling", "no") if submit.prompt == [98] else None)

    async def scenario() -> tuple[int, int]:
        async with serving(script) as one:
            gc.collect()
            gc.disable()
            before = alive()
            for _ in range(5):
                sent = KINDS[kind].replace(b"localhost\r\n", b"localhost\r\nconnection: close\r\n")
                assert b"HTTP/1.1 " in await asyncio.to_thread(talk, one.port, sent)
            await asyncio.sleep(0.1)
            return before, alive()

    try:
        before, after = run(scenario())
    finally:
        gc.enable()
    assert after <= before


def test_a_client_that_goes_is_not_answered_any_more() -> None:
    script = Script(go_on=asyncio.Event())

    async def scenario() -> None:
        async with serving(script) as one:
            reader, writer = await one.connect()
            writer.write(REQUEST)
            await reader.readuntil(b"data: ")
            writer.close()
            while not script.cancelled:
                await asyncio.sleep(0.001)

    run(scenario())


def test_a_quiet_stream_sends_comments() -> None:
    script = Script(go_on=asyncio.Event())

    async def scenario() -> bytes:
        async with serving(script, quiet_s=0.05) as one:
            reader, writer = await one.connect()
            writer.write(REQUEST.replace(b"localhost\r\n", b"localhost\r\nconnection: close\r\n"))
            await reader.readuntil(b": still at work\n\n")
            script.go_on.set()  # type: ignore[union-attr]
            rest = await reader.read(-1)
            writer.close()
            return rest

    assert b"data: [DONE]\n\n" in run(scenario())


def test_a_signal_lets_replies_end_and_takes_nothing_new() -> None:
    script = Script(go_on=asyncio.Event())

    async def scenario() -> tuple[bytes, dict[str, Any]]:
        async with serving(script) as one:
            asking = asyncio.create_task(one.said(REQUEST))
            while not script.submitted:
                await asyncio.sleep(0.001)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(ConnectionError):
                while True:
                    await one.said(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            script.go_on.set()  # type: ignore[union-attr]
            return await asking, await one.task

    answer, report = run(scenario())
    assert b'"text":"o"' in answer and b"data: [DONE]\n\n" in answer
    assert report == {"tokens": 5}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_is_loaded_ends_a_server_as_it_does_any_verb(number: signal.Signals) -> None:
    """It was a drain of nothing, with the report `{}` and the status of one that had served, after as long as the engine's imports took."""
    script, came = Script(load=asyncio.Event()), list[int]()

    async def start() -> FakeMotor:
        return FakeMotor(script)

    async def scenario() -> None:
        supervisor = Supervisor(start, Open("plan.yaml"), tell)
        with contextlib.closing(bound("127.0.0.1", 0)) as sock:
            task = asyncio.create_task(serve_on(sock, Served("model"), vocabulary(), Keys(()), supervisor))
            while supervisor.progress is None:
                await asyncio.sleep(0.001)
            os.kill(os.getpid(), number)
            await task
        assert supervisor.state == "stopped"

    with noted(came):
        run(scenario())
    assert came == [number]


def test_what_has_not_ended_when_the_drain_is_over_gets_an_error_event_and_the_report_is_there() -> None:
    script = Script(go_on=asyncio.Event())

    async def scenario() -> tuple[bytes, object]:
        async with serving(script, drain_s=0.2) as one:
            reader, writer = await one.connect()
            writer.write(REQUEST)
            await reader.readuntil(b"data: ")
            os.kill(os.getpid(), signal.SIGINT)
            rest = await reader.read(-1)
            writer.close()
            return rest, await one.task

    answer, report = run(scenario())
    assert b'"code":"draining"' in answer and b"data: [DONE]\n\n" in answer
    assert report == {"tokens": 5}


def test_a_server_whose_engine_only_the_user_can_help_ends_with_its_words() -> None:
    script = Script(failed=Failed("needs more memory", True))

    async def scenario() -> None:
        async with serving(script) as one:
            with pytest.raises(UserError, match="needs more memory"):
                await one.task

    run(scenario())


def test_an_address_that_cannot_be_is_refused_in_a_line() -> None:
    with bound("127.0.0.1", 0) as sock, pytest.raises(UserError, match="choose another port"):
        bound("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(UserError, match="host="):
        bound("a" * 64, 0)
    with pytest.raises(UserError, match=r"host=192.0.2.1 port=0: .*; give an address of this machine"):
        bound("192.0.2.1", 0)
