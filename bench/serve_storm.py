"""Many requests of many clients, some of whom go away, read slowly, or send what is no request; each reply is judged."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.clients import CHAT, COMPLETIONS
from bench.known import Known
from bench.sse import Address, Reply, ask, receive

KINDS = {"known": 0.55, "stream": 0.15, "nonce": 0.1, "leaves": 0.08, "slow": 0.04, "malformed": 0.08}
"""Kind of a request -> its share."""
SLOW_BYTES, SLOW_S = 200, 0.1
"""A slow reader takes so many bytes at a time, and waits so long between."""
HANGS_S = 120.0


@dataclass
class Storm:
    """What came of it."""

    asked: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    """How requests ended: answered, refused, an error, gone."""
    wrong: list[str] = field(default_factory=list)
    samples: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    """Requests so far, and what ``look`` said then."""


def malformed(model: str, draw: random.Random) -> tuple[str, bytes]:
    """A path and a body that every server must refuse."""
    good: dict[str, Any] = {"model": model, "prompt": "x = ", "max_tokens": 4}
    cases: list[tuple[str, bytes]] = [
        (COMPLETIONS, b""), (COMPLETIONS, b"{"), (COMPLETIONS, b"[]"), (COMPLETIONS, b"null"), (COMPLETIONS, b"\xff\xfe{}"),
        (COMPLETIONS, b'{"model": "' + model.encode() + b'", "prompt": "\\ud800", "max_tokens": 1e400}'),
        (COMPLETIONS, b"[" * 100_000), (CHAT, b'{"messages": []}'),
    ]  # fmt: skip
    changes: list[dict[str, Any]] = [
        {"max_tokens": -1}, {"max_tokens": "many"}, {"temperature": 1e9}, {"temperature": float("nan")}, {"n": 0}, {"n": 10**9},
        {"top_p": 2}, {"stop": [1]}, {"logit_bias": {"x": 1}}, {"logit_bias": {"-1": 1}}, {"prompt": {"a": 1}},
        {"prompt": [10**12]}, {"prompt": [-1]},
        {"colour": "blue"}, {"max_tokens": 10**12}, {"model": "another"}, {"stream": "yes"}, {"logprobs": -3}, {"seed": "s"},
        {"prompt": "x " * 200_000},
    ]  # fmt: skip
    cases += [(COMPLETIONS, json.dumps(good | change).encode()) for change in changes]
    return draw.choice(cases)


class Weather:
    """Sends requests of all kinds to ``address``."""

    def __init__(self, address: Address, model: str, known: Sequence[Known], seed: int = 0):
        self._address, self._model, self._replies, self._seed = address, model, known, seed
        self.storm = Storm()

    async def blow(self, requests: int, clients: int, look: Callable[[], Mapping[str, float]], every: int) -> Storm:
        """``look`` is asked after each ``every`` requests."""
        numbers, storm = iter(range(requests)), self.storm

        async def client() -> None:
            for number in numbers:
                draw = random.Random(f"{self._seed} {number}")
                kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
                storm.asked[kind] += 1
                try:
                    wrong = await asyncio.wait_for(getattr(self, f"_{kind}")(number, draw), HANGS_S)
                except TimeoutError:
                    wrong = f"no end after {HANGS_S:g} s"
                if wrong:
                    storm.wrong.append(f"{kind} {number}: {wrong}")
                if number % every == 0:
                    storm.samples.append((number, look()))

        await asyncio.gather(*(client() for _ in range(clients)))
        return storm

    def _judge(self, known: Known, reply: Reply) -> str | None:
        self._count(reply)
        return known.wrong(reply)

    def _count(self, reply: Reply) -> None:
        self.storm.ended["answered" if reply.answered else f"status {reply.status}" if reply.status != 200 else "error event"] += 1

    async def _one(self, draw: random.Random, stream: bool) -> str | None:
        known = draw.choice(self._replies)
        body = known.body(self._model, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        return self._judge(known, await ask(self._address, COMPLETIONS, body))

    async def _known(self, number: int, draw: random.Random) -> str | None:
        return await self._one(draw, False)

    async def _stream(self, number: int, draw: random.Random) -> str | None:
        return await self._one(draw, True)

    async def _nonce(self, number: int, draw: random.Random) -> str | None:
        """Its own prompt must come back, and no one else's."""
        prompt = f"nonce_{number}_{draw.getrandbits(64):x} = "
        body = {"model": self._model, "prompt": prompt, "max_tokens": draw.randrange(1, 6), "echo": True, "seed": 1, "ignore_eos": True}
        reply = await ask(self._address, COMPLETIONS, body)
        self._count(reply)
        if not reply.answered:
            return None if reply.error and reply.whole else f"neither answered nor an error: {reply.status} {reply.error}"
        return None if reply.text.startswith(prompt) else f"{reply.text!r} does not begin with {prompt!r}"

    async def _leaves(self, number: int, draw: random.Random) -> str | None:
        """It goes away: before the body is whole, before the reply, or in the middle of it."""
        body = json.dumps(draw.choice(self._replies).body(self._model, stream=True, max_tokens=64)).encode()
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            head = self._address.head("POST", COMPLETIONS, body)
            stage = draw.randrange(3)
            writer.write(head + (body[: draw.randrange(len(body))] if stage == 0 else body))
            await writer.drain()
            if stage == 1:
                await asyncio.sleep(draw.random() * 0.05)
            if stage == 2:
                await reader.read(draw.randrange(1, 600))
            if draw.random() < 0.5:
                writer.transport.abort()
        except OSError:
            pass
        finally:
            writer.close()
        self.storm.ended["gone"] += 1
        return None

    async def _slow(self, number: int, draw: random.Random) -> str | None:
        known = draw.choice(self._replies)
        body = json.dumps(known.body(self._model, stream=True)).encode()
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port, limit=1 << 10)
        reply, fed = Reply(time.perf_counter()), asyncio.StreamReader()
        try:
            writer.write(self._address.head("POST", COMPLETIONS, body) + body)
            receiving = asyncio.create_task(receive(fed, reply))
            while data := await reader.read(SLOW_BYTES):
                fed.feed_data(data)
                await asyncio.sleep(SLOW_S)
            fed.feed_eof()
            await receiving
        except (OSError, asyncio.IncompleteReadError) as error:
            reply.error = reply.error or f"{type(error).__name__}: {error}"
        finally:
            writer.close()
        return self._judge(known, reply)

    async def _malformed(self, number: int, draw: random.Random) -> str | None:
        path, body = malformed(self._model, draw)
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        reply = Reply(time.perf_counter())
        try:
            writer.write(self._address.head("POST", path, body) + body)
            await receive(reader, reply)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            return f"{body[:60]!r}: {type(error).__name__}: {error}"
        finally:
            writer.close()
        self._count(reply)
        said = (reply.document or {}).get("error")
        fine = 400 <= reply.status < 500 and isinstance(said, dict) and {"message", "type", "param", "code"} <= said.keys()
        return None if fine else f"{path} {body[:80]!r}: {reply.status} {reply.document}"
