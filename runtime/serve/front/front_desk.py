"""What every route of a server shares: the model's words, the engine, who asks, what is counted."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from penstock.runtime.asked.prompts import Vocabulary
from penstock.runtime.serve.dialects.model_talk import Talk
from penstock.runtime.serve.front.api_errors import SAID, ApiError, wrong
from penstock.runtime.serve.front.asking import Asking, Usage, Wanted
from penstock.runtime.serve.front.callers import Caller, Crowd, Keys
from penstock.runtime.serve.front.front_limits import FrontLimits
from penstock.runtime.serve.front.front_meters import Meters
from penstock.runtime.serve.front.supervise import Supervisor
from penstock.runtime.serve.front.token_texts import TokenTexts
from penstock.runtime.serve.wire.messages import EngineInfo, Submit

Read = TypeVar("Read")
LONG_S = 0.05
"""Of reading a text: longer than 20,000 characters take."""


@dataclass
class Front:
    """One server."""

    model: str
    """The name that clients ask for."""
    vocabulary: Vocabulary
    talk: Talk
    supervisor: Supervisor
    keys: Keys
    limits: FrontLimits
    connections: Callable[[], int] = lambda: 0
    """How many are open."""
    crowd: Crowd = field(init=False)
    meters: Meters = field(init=False)
    texts: TokenTexts = field(init=False)
    started_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.crowd, self.meters, self.texts = Crowd(self.limits), Meters(self.supervisor), TokenTexts(self.vocabulary)
        self.meters.open_requests.set_function(lambda: self.crowd.under_way)
        self.meters.connections.set_function(self.connections)
        self._numbers = itertools.count(1)
        self._texts = ThreadPoolExecutor(1, "texts")

    async def beside(self, read: Callable[[], Read]) -> Read:
        """What ``read`` makes of a request's text, beside the event loop. One at a time: a tokenizer takes some 100 bytes a character."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, _tidily, read)

    @property
    def info(self) -> EngineInfo:
        """What is served. ApiError 503 before the engine has said so."""
        if self.supervisor.info is None:
            raise ApiError(503, "the model is being loaded; see /ready", code="loading", retry_after_s=5)
        return self.supervisor.info

    @property
    def capacity_tokens(self) -> int:
        """Of a prompt and its reply together."""
        return self.info.capacity_tokens

    @property
    def most_prompt_tokens(self) -> int:
        """Of a prompt. ApiError 503 as ``info``."""
        return min(self.capacity_tokens, self.limits.prompt_tokens or self.capacity_tokens)

    def too_long(self, tokens: int, asked: int | None = None) -> ApiError:
        """Of a prompt of so many ``tokens``, behind which ``asked`` are wanted; None: it is too long whatever is."""
        own = self.limits.prompt_tokens
        if own is not None and tokens > own:
            message = f"The prompt has {tokens} tokens; this server takes {own} at most. Shorten the prompt."
            return ApiError(400, message, param=SAID, code="context_length_exceeded")
        message = f"This model's maximum context length is {self.capacity_tokens} tokens; the prompt has {tokens}"
        message += "." if asked is None else f" and {max(asked, 1)} were asked for."
        message += " Shorten the prompt." if asked is None else " Shorten the prompt, or ask for fewer tokens."
        return ApiError(400, message, param=SAID, code="context_length_exceeded")

    def check_model(self, name: str) -> None:
        """ApiError 404 for a model that is not served."""
        if name != self.model:
            raise ApiError(
                404, f"The model {name[:80]!r} does not exist here; ask for {self.model!r}", param="model", code="model_not_found"
            )

    def ask(self, wanted: Wanted, caller: Caller) -> Asking:
        """Send a request to the engine. ApiError where it is too long, where its key has enough under way, and while no engine is ready."""
        new_tokens = self._new_tokens(wanted)
        submit = Submit(
            next(self._numbers),
            list(wanted.prompt),
            new_tokens,
            wanted.sampling,
            sorted(self.vocabulary.stop_ids if wanted.stop_ids is None else wanted.stop_ids),
            min(wanted.min_tokens, new_tokens),
            wanted.ignore_eos,
            wanted.logprobs,
            wanted.prompt_logprobs,
            wanted.grammar,
            caller.salt(wanted.cache_salt),
            wanted.n,
        )
        self.crowd.enter(caller)
        counted = _Counted(self, caller)
        try:
            decode, limit_s = wanted.decode or self.vocabulary.text, self.limits.request_s
            asking = Asking(submit, wanted, decode, self.texts.alone, self.supervisor, counted, limit_s)
        except BaseException:
            counted.over()
            raise
        try:
            self.supervisor.submit(submit, asking.hear)
        except BaseException:
            asking.close()
            raise
        return asking

    def _new_tokens(self, wanted: Wanted) -> int:
        """Checks the lengths. -> Tokens of a reply, at most."""
        limits, size, capacity = self.limits, len(wanted.prompt), self.capacity_tokens
        if not size:
            raise wrong("prompt", "it has no tokens; give some text")
        if wanted.n > limits.choices:
            raise wrong("n", f"{wanted.n} replies; this server gives {limits.choices} at most")
        if limits.prompt_tokens is not None and size > limits.prompt_tokens:
            raise self.too_long(size)
        limit = capacity - size if limits.new_tokens is None else min(limits.new_tokens, capacity - size)
        asked = limit if wanted.new_tokens is None else wanted.new_tokens
        if size + asked > capacity or (wanted.new_tokens is None and limit < 1):
            raise self.too_long(size, asked)
        if limits.new_tokens is not None and asked > limits.new_tokens:
            raise wrong("max_tokens", f"{asked} tokens; this server gives {limits.new_tokens} at most")
        return asked


class _Counted:
    """One request, counted where it began and where it is over; see :class:`Told`."""

    def __init__(self, front: Front, caller: Caller):
        self._front, self._caller, self._waits = front, caller, True

    def began(self, usage: Usage) -> None:
        if self._waits:
            self._waits = False
            self._front.crowd.began(self._caller)
            self._front.meters.prompt_tokens.inc(usage.prompt_tokens)
            self._front.meters.cached_tokens.inc(usage.cached_tokens)

    def tokens(self, count: int, since_s: float, first: bool) -> None:
        (self._front.meters.ttft if first else self._front.meters.between).observe(since_s)

    def over(self) -> None:
        self._front.crowd.leave(self._caller, self._waits)


def caller_of(request: Request) -> Caller:
    """Who asks, as the guard found out."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def _tidily(read: Callable[[], Read]) -> Read:
    """As ``read``; what a long text took goes back to the system, which glibc keeps otherwise."""
    begun = time.monotonic()
    try:
        return read()
    finally:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None and time.monotonic() - begun > LONG_S:
            trim(0)
