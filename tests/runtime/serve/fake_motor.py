"""A motor that a test plays, in the front's own process, over the messages that the real one speaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from penstock.runtime.asked.prompts import Vocabulary
from penstock.runtime.serve.dialects.model_talk import Talk
from penstock.runtime.serve.front.callers import Keys
from penstock.runtime.serve.front.front_desk import Front
from penstock.runtime.serve.front.front_limits import FrontLimits
from penstock.runtime.serve.front.supervise import Supervisor
from penstock.runtime.serve.front.token_texts import byte_letters
from penstock.runtime.serve.routes.serve_app import serve_app
from penstock.runtime.serve.wire.frames import AsyncFrames
from penstock.runtime.serve.wire.messages import (
    Began,
    Cancel,
    Chosen,
    Drain,
    EngineInfo,
    Loading,
    Message,
    Open,
    Over,
    Pass,
    PromptLogprobs,
    Ready,
    Stopped,
    Submit,
    Vital,
    heard,
    said,
)

EOS = 256
CAPACITY = 512
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"
KEY = "a-key-of-many-letters"


def vocabulary() -> Vocabulary:
    """Each byte is a token; 256 ends a reply."""
    model = models.BPE({letter: byte for letter, byte in byte_letters().items()}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    return Vocabulary(fast, frozenset({EOS}), 257, GenerationConfig())


@dataclass
class Script:
    """What motors do; a test may change it while they run."""

    reply: Callable[[Submit], list[int]] = lambda submit: list(b"hello")
    """Tokens of each reply; the stop id among them ends it."""
    load: asyncio.Event | None = None
    """Motors wait for it before they are ready."""
    begin: asyncio.Event | None = None
    """Requests wait for it before they begin."""
    go_on: asyncio.Event | None = None
    """Replies wait for it before their second token."""
    instead: Callable[[Submit], Message | None] = lambda submit: None
    """What is said instead of an answer."""
    failed: Message | None = None
    """What is said instead of Ready."""
    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[Cancel] = field(default_factory=list)
    started: int = 0
    motors: list[FakeMotor] = field(default_factory=list)


class FakeMotor:
    """One motor; see ``MotorProcess``."""

    def __init__(self, script: Script):
        self.sock, self._theirs = socket.socketpair()
        self._script = script
        self._over: dict[tuple[int, int], bool] = {}
        self._task = asyncio.create_task(self._run())
        script.motors.append(self)
        script.started += 1

    async def ended(self) -> int:
        await asyncio.wait([self._task])
        return 0

    def kill(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        frames = await AsyncFrames.over(self._theirs)
        living: dict[int, asyncio.Task[None]] = {}
        stopping: asyncio.Task[None] | None = None
        try:
            while (data := await frames.receive()) is not None:
                message = heard(data)
                if isinstance(message, Open):
                    await self._open(frames)
                    if self._script.failed is not None:
                        return
                elif isinstance(message, Submit):
                    self._script.submitted.append(message)
                    living[message.id] = asyncio.create_task(self._answer(frames, message))
                elif isinstance(message, Cancel):
                    self._script.cancelled.append(message)
                    self._over[message.id, -1 if message.index is None else message.index] = True
                    if message.index is None and message.id in living:
                        living[message.id].cancel()
                elif isinstance(message, Drain):
                    stopping = asyncio.create_task(self._stop(frames, list(living.values())))
        finally:
            for task in [*living.values(), *([stopping] if stopping else [])]:
                task.cancel()
            frames.close()

    async def _stop(self, frames: AsyncFrames, living: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*living, return_exceptions=True)
        with contextlib.suppress(OSError):
            await frames.send(said(Stopped({"tokens": 5})))
        frames.close()

    async def _open(self, frames: AsyncFrames) -> None:
        await frames.send(said(Loading("weights", 1, 2)))
        if self._script.failed is not None:
            await frames.send(said(self._script.failed))
            return
        if self._script.load is not None:
            await self._script.load.wait()
        info = EngineInfo("model", "/c", 257, CAPACITY, {"rows": 4, "queue": 60}, {"tokens_per_s": 3.5}, 0.1, "1")
        passes = {"passes": 3, "seconds": 1.5, "predicted_s": 1.25, "longest_s": 0.75}
        stats = {"rows": 1, "busy_s": 2.0, "binds": "link", "tiers": {"vram": {"kv": 7}}, "kinds": {"prompt": passes}}
        await frames.send(said(Ready(info)), said(Vital(stats)))

    async def _answer(self, frames: AsyncFrames, submit: Submit) -> None:
        with contextlib.suppress(OSError):
            await self._say(frames, submit)

    async def _say(self, frames: AsyncFrames, submit: Submit) -> None:
        instead = self._script.instead(submit)
        if instead is not None:
            await frames.send(said(instead))
            return
        if self._script.begin is not None:
            await self._script.begin.wait()
        await frames.send(said(Began(submit.id, len(submit.prompt), 2)))
        if submit.prompt_logprobs is not None:
            rows = [
                (token, -0.5, ([token, 65][: submit.prompt_logprobs], [-0.5, -1.5][: submit.prompt_logprobs]))
                for token in submit.prompt[1:]
            ]
            await frames.send(said(PromptLogprobs(submit.id, rows)))
        await asyncio.gather(*(self._one(frames, submit, index) for index in range(submit.n)))

    async def _one(self, frames: AsyncFrames, submit: Submit, index: int) -> None:
        reason: Any = "length"
        end: tuple[Any, ...] = ()
        for count, token in enumerate(self._script.reply(submit)[: submit.new_tokens]):
            if self._over.get((submit.id, index)) or self._over.get((submit.id, -1)):
                return
            if token in submit.stop_ids and not submit.ignore_eos:
                reason = "stop"
                end = (token, None, None if submit.logprobs is None else (-0.125, [token][: submit.logprobs], [-0.125][: submit.logprobs]))
                break
            if count and self._script.go_on is not None:
                await self._script.go_on.wait()
            logprobs = None if submit.logprobs is None else [(-0.25, [token, 66][: submit.logprobs], [-0.25, -2.0][: submit.logprobs])]
            await frames.send(said(Pass([Chosen(submit.id, index, [token], logprobs)])))
            await asyncio.sleep(0)
        await frames.send(said(Over(submit.id, index, reason, *end)))


@contextlib.asynccontextmanager
async def asked(
    script: Script,
    limits: FrontLimits | None = None,
    keys: tuple[str, ...] = (),
    ready: bool = True,
    told: list[str] | None = None,
    words: Vocabulary | None = None,
    **more: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose motors play ``script``; it is ready, unless told otherwise. Its Front is ``client.front``."""

    async def start() -> FakeMotor:
        return FakeMotor(script)

    loading = more.get("loading", lambda _: None)
    supervisor = Supervisor(start, Open("plan.yaml"), ([] if told is None else told).append, loading=loading)
    words = words or vocabulary()
    front = Front("model", words, Talk(words), supervisor, Keys(keys), limits or FrontLimits())
    app = serve_app(front, not keys, more.get("origins", ()), supervisor._tell)
    running = asyncio.create_task(supervisor.run())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            client.front = front  # type: ignore[attr-defined]
            while ready and supervisor.state != "ready":
                await asyncio.sleep(0.001)
            yield client
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
