"""Questions to a server whose motor the test plays, and what it answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.runtime.serve.fake_motor import Script, asked

Asks = Callable[[httpx.AsyncClient], Awaitable[Any]]


def play(script: Script, ask: Asks, **more: Any) -> Any:
    """What ``ask`` finds out of a server."""

    async def scenario() -> Any:
        async with asked(script, **more) as client:
            return await ask(client)

    return asyncio.run(asyncio.wait_for(scenario(), 60))


def post(path: str = "/v1/completions", **body: Any) -> Asks:
    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json={"model": "model"} | body)

    return ask


async def until(holds: Callable[[], object]) -> None:
    """Return when ``holds()`` does; ``play`` ends what never does."""
    while not holds():
        await asyncio.sleep(0.001)


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, its end left out."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
