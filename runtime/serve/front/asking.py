"""One request to the engine, whatever dialect it came in: from token ids to pieces of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Protocol

from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.reply_text import ReplyText
from penstock.runtime.serve.wire.messages import Began, Cancel, Chosen, Message, Over, PromptLogprobs, Refused, Sampled, Submit, TopLogprobs

PromptRow = tuple[int, float, tuple[list[int], list[float]]]
"""(token, logprob, (likeliest tokens, their logprobs))"""
_STATUS = {"queue_full": 429, "draining": 503}
_CODES = {"queue_full": "queue_full", "too_long": "context_length_exceeded"}


@dataclass(frozen=True)
class Wanted:
    """What a dialect has read from a body."""

    prompt: tuple[int, ...]
    new_tokens: int | None = None
    """At most; None: as many as the context has room for."""
    sampling: Sampled = Sampled()
    stops: tuple[str, ...] = ()
    """Texts that end a reply, which they are no part of."""
    stop_ids: frozenset[int] | None = None
    """Tokens that end a reply; None: the model's own."""
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    """So many likeliest tokens beside each one; 0: its own logprob alone; None: none."""
    prompt_logprobs: int | None = None
    grammar: str | None = None
    """llguidance's, as JSON."""
    cache_salt: str = ""
    n: int = 1
    decode: Callable[[list[int]], str] | None = None
    """Token ids as text; None: without special tokens."""


@dataclass(frozen=True)
class Usage:
    """Tokens, of all n replies."""

    prompt_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those that were not computed again."""
    completion_tokens: int = 0


@dataclass(frozen=True)
class Piece:
    """What reply ``index`` goes on with. The last one has a ``finish_reason``; ``text`` and ``tokens`` may be empty in any."""

    index: int
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TopLogprobs] | None = None
    """One for each of ``tokens``, where they were asked for."""
    finish_reason: str | None = None
    """``stop`` or ``length``"""
    stop: str | None = None
    """The stop string that ended it."""
    end: tuple[int, TopLogprobs] | None = None
    """The token that ended it, which is no part of it, where logprobs were asked for."""


class Line(Protocol):
    """The way to the engine, for one request after the other."""

    def post(self, message: Message) -> None:
        """Send it, soon."""

    def leave(self, number: int) -> None:
        """No more of this request."""


class Told(Protocol):
    """Hears of a request what is counted."""

    def began(self, usage: Usage) -> None: ...
    def tokens(self, count: int, since_s: float, first: bool) -> None:
        """``count`` tokens of one reply came ``since_s`` after the request, if they are the ``first``, else after the ones before."""

    def over(self) -> None: ...


class Asking:
    """An async iterator of the pieces of all n replies; ``usage`` and ``prompt_rows`` say what is known so far.

    Iterating raises ApiError where the engine refuses or fails, and when ``limit_s`` are over. ``close`` gives the request up, at any time
    and more than once; leaving ``async with`` does.
    """

    def __init__(self, submit: Submit, wanted: Wanted, decode: Callable[[list[int]], str], line: Line, told: Told, limit_s: float):
        self.mail: asyncio.Queue[Message | ApiError] = asyncio.Queue()
        """Where what the engine says of this request arrives."""
        self.usage = Usage(len(submit.prompt))
        self.prompt_rows: list[PromptRow] = []
        """Of the prompt's tokens from the second on, where prompt logprobs were asked for."""
        self.at: float | None = None
        """When the engine knew the tokens of the newest piece (``time.monotonic``)."""
        self._number, self._line, self._told, self._limit_s = submit.id, line, told, limit_s
        self._texts = [ReplyText(decode, wanted.stops) for _ in range(submit.n)]
        self._living = set(range(submit.n))
        self._heard_at: dict[int, float] = {}
        self._asked_at = time.monotonic()
        self._ready: Message | ApiError | None = None
        self._gone: ApiError | None = None
        self._closed = False
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._late)

    async def settled(self, patience_s: float) -> None:
        """Return once the engine has begun with it, or after ``patience_s``. ApiError where it is refused meanwhile."""
        if self._ready is None:
            try:
                self._ready = await asyncio.wait_for(self.mail.get(), patience_s)
            except TimeoutError:
                return
        try:
            self._check(self._ready)
        except ApiError:
            self.close()
            raise

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[Piece]:
        while self._living:
            message, self._ready = self._ready if self._ready is not None else await self.mail.get(), None
            self._check(self._gone or message)
            piece = self._heard(message)
            if piece is not None:
                yield piece
        self.close()

    def _heard(self, message: Message | ApiError) -> Piece | None:
        if isinstance(message, Chosen) and message.index in self._living:
            return self._chosen(message)
        if isinstance(message, Over) and message.index in self._living:
            return self._over(message)
        if isinstance(message, Began):
            self.usage = replace(self.usage, prompt_tokens=message.prompt_tokens, cached_tokens=message.cached_tokens)
            self._told.began(self.usage)
        if isinstance(message, PromptLogprobs):
            self.prompt_rows += message.rows
        return None

    def _chosen(self, message: Chosen) -> Piece:
        now, text = time.monotonic(), self._texts[message.index]
        self._told.tokens(len(message.tokens), now - self._heard_at.get(message.index, self._asked_at), message.index not in self._heard_at)
        self._heard_at[message.index] = now
        self.at = message.at
        self.usage = replace(self.usage, completion_tokens=self.usage.completion_tokens + len(message.tokens))
        new = text.add(message.tokens)
        if text.stop is not None:
            self._living.discard(message.index)
            self._line.post(Cancel(self._number, message.index))
        return Piece(message.index, new, message.tokens, message.logprobs, None if text.stop is None else "stop", text.stop)

    def _over(self, message: Over) -> Piece:
        if message.reason in ("error", "abort"):
            raise ApiError(500, message.message or "the engine gave this request up; ask again", code="engine_error")
        text = self._texts[message.index]
        self._living.discard(message.index)
        new = text.rest()
        end = None if message.stop_id is None or message.logprobs is None else (message.stop_id, message.logprobs)
        return Piece(message.index, new, finish_reason="stop" if text.stop is not None else message.reason, stop=text.stop, end=end)

    def _check(self, message: Message | ApiError) -> None:
        if isinstance(message, ApiError):
            raise message
        if isinstance(message, Refused):
            self._living.clear()
            status = _STATUS.get(message.kind, 400)
            retry = None if status == 400 else 1
            raise ApiError(status, message.message, code=_CODES.get(message.kind, message.kind), retry_after_s=retry)

    def _late(self) -> None:
        self.mail.put_nowait(ApiError(504, f"not answered within {self._limit_s:g} s; ask for fewer tokens, or later", code="timeout"))

    def give_up(self, error: ApiError) -> None:
        """Iterating raises ``error`` now, whatever has been heard before."""
        self._gone = error
        self.mail.put_nowait(error)

    def close(self) -> None:
        """Nobody waits for this any more."""
        if self._closed:
            return
        self._closed = True
        self._timer.cancel()
        self._line.leave(self._number)
        if self._living:
            self._line.post(Cancel(self._number))
        self._told.over()

    async def __aenter__(self) -> Asking:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
