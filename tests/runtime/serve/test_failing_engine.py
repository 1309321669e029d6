"""An engine that loads, refuses, fails or ends, and a front that fails: what a client and the log are told."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from penstock.runtime.serve.front.front_limits import FrontLimits
from penstock.runtime.serve.front.reply_text import ReplyText
from penstock.runtime.serve.wire.messages import Failed, Loading, Over, Refused
from tests.runtime.serve.fake_motor import Script
from tests.runtime.serve.played import events, play, post, until

REFUSED = [
    ("queue_full", 429, "rate_limit_error"),
    ("too_long", 400, "invalid_request_error"),
    ("bad_grammar", 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("kind", "status", "error"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_has_a_status(kind: str, status: int, error: str, stream: bool) -> None:
    script = Script(instead=lambda submit: Refused(submit.id, kind, "no"))
    response = play(script, post(prompt="a", stream=stream))
    assert (response.status_code, response.json()["error"]["type"]) == (status, error)
    assert ("retry-after" in response.headers) is (status == 429)


def test_an_engine_that_fails_in_the_middle_ends_a_stream_with_an_error_event() -> None:
    script = Script(go_on=asyncio.Event())

    async def ask(client: httpx.AsyncClient) -> Any:
        streaming = asyncio.create_task(post(prompt="a", stream=True)(client))
        whole = asyncio.create_task(post(prompt="a")(client))
        await until(lambda: len(script.submitted) == 2 and not client.front.crowd._waiting)  # type: ignore[attr-defined]
        script.motors[0].kill()
        ended = await streaming, await whole
        meanwhile = await post(prompt="a")(client)
        script.go_on = None
        await until(lambda: client.front.supervisor.state == "ready")  # type: ignore[attr-defined]
        return (*ended, meanwhile, await post(prompt="a")(client))

    streamed, whole, meanwhile, later = play(script, ask)
    last = events(streamed)[-1]
    assert streamed.status_code == 200 and last["error"]["code"] == "engine_ended"
    assert (whole.status_code, meanwhile.status_code, later.status_code) == (503, 503, 200)
    assert "retry-after" in meanwhile.headers and script.started == 2


def test_each_start_tells_how_far_it_is_and_when_it_is_ready() -> None:
    script, told = Script(), list[Loading | None]()

    async def ask(client: httpx.AsyncClient) -> None:
        script.motors[0].kill()
        await until(lambda: told.count(None) == 2)

    play(script, ask, loading=told.append)
    assert told == [Loading("weights", 1, 2), None] * 2


def test_one_reply_that_fails_fails_alone() -> None:
    script = Script(instead=lambda submit: Over(submit.id, 0, "error", message="out of pages") if submit.prompt == [65] else None)

    async def ask(client: httpx.AsyncClient) -> Any:
        return [(await post(prompt=[token])(client)).status_code for token in (65, 66)]

    assert play(script, ask) == [500, 200]


def test_a_request_that_takes_too_long_ends() -> None:
    script = Script(begin=asyncio.Event())
    response = play(script, post(prompt="a"), limits=FrontLimits(request_s=0.05))
    assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"


def test_an_engine_that_only_the_user_can_help_is_not_started_again() -> None:
    script, told = Script(failed=Failed("no room", True)), []

    async def ask(client: httpx.AsyncClient) -> Any:
        supervisor = client.front.supervisor  # type: ignore[attr-defined]
        await until(lambda: supervisor.state == "stopped")
        return str(supervisor.refused), script.started

    assert play(script, ask, ready=False, told=told) == ("no room", 1)
    assert told == ["no room"]


def test_before_it_is_loaded_a_server_says_how_far_it_is() -> None:
    script = Script(load=asyncio.Event())

    async def ask(client: httpx.AsyncClient) -> Any:
        supervisor = client.front.supervisor  # type: ignore[attr-defined]
        await until(lambda: supervisor.progress is not None)
        replies = [await client.get(path) for path in ("/health", "/ready")] + [await post(prompt="a")(client)]
        replies += [await client.head(path) for path in ("/health", "/ready")]
        script.load.set()  # type: ignore[union-attr]
        return [reply.status_code for reply in replies], replies[1].json()

    statuses, ready = play(script, ask, ready=False)
    assert statuses == [200, 503, 503, 200, 503], "some balancers ask by HEAD"
    assert ready == {"status": "loading", "progress": {"phase": "weights", "done": 1, "total": 2}}


def test_a_fault_is_a_500_and_neither_it_nor_the_log_holds_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def ask(client: httpx.AsyncClient) -> Any:
        def broken(text: str, most: int) -> tuple[int, ...]:
            raise RuntimeError(text)

        monkeypatch.setattr(client.front.talk, "plain_ids", broken)  # type: ignore[attr-defined]
        return await post(prompt="my secret")(client)

    response = play(Script(), ask, told=told)
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    assert "RuntimeError" in told[-1] and "secret" not in response.text + "".join(told)


def test_a_fault_in_the_middle_of_a_stream_is_its_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def broken(self: ReplyText, tokens: list[int]) -> str:
        raise RuntimeError("my secret")

    monkeypatch.setattr(ReplyText, "add", broken)
    response = play(Script(), post(prompt="a", stream=True), told=told)
    assert response.status_code == 200 and events(response)[-1]["error"]["type"] == "server_error"
    assert "RuntimeError" in told[-1] and "secret" not in response.text + "".join(told)
