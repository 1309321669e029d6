"""Who may ask a server, and how much at once: keys, names of the machine, origins, limits."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from penstock.planner.common.errors import UserError
from penstock.runtime.serve.front.front_limits import FrontLimits
from tests.runtime.serve.fake_motor import KEY, Script
from tests.runtime.serve.played import play, post, until


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"authorization": f"Bearer {KEY}x"}, 401), ({"x-api-key": "ü"}, 401), ({"authorization": f"bearer {KEY}"}, 200),
     ({"x-api-key": KEY}, 200)],
)  # fmt: skip
def test_a_key_opens_and_no_other_does(headers: dict[str, str], status: int) -> None:
    async def ask(client: httpx.AsyncClient) -> tuple[int, ...]:
        raw = {name: value.encode() for name, value in headers.items()}
        paths = ("/v1/models", "/metrics", "/openapi.json", "/health")
        return tuple([(await client.get(path, headers=raw)).status_code for path in paths])

    assert play(Script(), ask, keys=(KEY, "another-of-many-letters")) == (status, status, status, 200)


def test_keys_share_no_prefix_with_each_other() -> None:
    script = Script()

    async def ask(client: httpx.AsyncClient) -> None:
        for key in (KEY, KEY + "2"):
            for salt in ("", "s"):
                body = {"model": "model", "prompt": "a", "cache_salt": salt}
                await client.post("/v1/completions", json=body, headers={"x-api-key": key})

    play(script, ask, keys=(KEY, KEY + "2"))
    assert len({submit.salt for submit in script.submitted}) == 4
    assert not any(KEY in submit.salt for submit in script.submitted)


def test_without_keys_only_names_of_this_machine_are_answered() -> None:
    async def ask(client: httpx.AsyncClient) -> list[int]:
        hosts = ("localhost:8000", "127.0.0.1", "[::1]:8000", "evil.example:8000")
        return [(await client.get("/v1/models", headers={"host": host})).status_code for host in hosts]

    assert play(Script(), ask) == [200, 200, 200, 403]


def test_no_other_origin_may_ask_unless_it_is_named() -> None:
    async def ask(client: httpx.AsyncClient) -> Any:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        reply = await client.options("/v1/completions", headers=headers)
        return reply.headers.get("access-control-allow-origin")

    assert play(Script(), ask) is None
    assert play(Script(), ask, origins=("https://a.example",)) == "https://a.example"


def test_a_key_has_so_many_requests_and_no_more_and_what_ends_makes_room() -> None:
    script = Script(begin=asyncio.Event())

    async def ask(client: httpx.AsyncClient) -> Any:
        first = [asyncio.create_task(post(prompt="a")(client)) for _ in range(2)]
        await until(lambda: len(script.submitted) >= 2)
        refused = await post(prompt="a")(client)
        script.begin.set()  # type: ignore[union-attr]
        await asyncio.gather(*first)
        return refused, await post(prompt="a")(client), client.front.crowd.under_way  # type: ignore[attr-defined]

    refused, later, under_way = play(script, ask, limits=FrontLimits(requests_per_key=2))
    assert (refused.status_code, refused.headers["retry-after"], refused.json()["error"]["type"]) == (429, "1", "rate_limit_error")
    assert later.status_code == 200 and under_way == 0


def test_requests_that_have_begun_do_not_wait_any_more() -> None:
    script = Script(go_on=asyncio.Event())

    async def ask(client: httpx.AsyncClient) -> list[int]:
        begun = []
        for _ in range(3):
            begun.append(asyncio.create_task(post(prompt="a", stream=True)(client)))
            await until(lambda: len(script.submitted) == len(begun) and not client.front.crowd._waiting)  # type: ignore[attr-defined]
        script.begin = asyncio.Event()
        waits = asyncio.create_task(post(prompt="a")(client))
        await until(lambda: len(script.submitted) >= 4)
        refused = await post(prompt="a")(client)
        script.begin.set()
        script.go_on.set()  # type: ignore[union-attr]
        return [(await task).status_code for task in [*begun, waits]] + [refused.status_code]

    assert play(script, ask, limits=FrontLimits(waiting_per_key=1)) == [200, 200, 200, 200, 429]


def test_limits_that_nothing_keeps_to_are_refused() -> None:
    with pytest.raises(UserError, match="limits.body_s"):
        replace(FrontLimits(), body_s=0).check()
