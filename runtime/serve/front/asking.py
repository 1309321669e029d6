"""One request to the engine, whatever dialect it came in: from token ids to pieces of text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.runtime.serve.front.api_errors import ApiError
from penstock.runtime.serve.front.reply_text import ReplyText
from penstock.runtime.serve.wire.messages import Began, Cancel, Chosen, Message, Over, PromptLogprobs, Refused, Sampled, Submit, TopLogprobs

Word = Message | Chosen
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


@dataclass(slots=True)
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


class Hearer(Protocol):
    """Hears what becomes of a request, while the engine's message is read: it must be quick, and wait for nothing."""

    def piece(self, number: int, piece: Piece) -> None: ...
    def ended(self, number: int, error: Exception | None) -> None:
        """Nothing comes any more. ``error`` is an ApiError where the engine refused or failed."""


class Asking:
    """One request of n replies; ``usage`` and ``prompt_rows`` say what is known so far.

    What the engine says is kept until someone listens, and told at once from then on. ``close`` gives the request up, at any time and more
    than once.
    """

    def __init__(
        self,
        submit: Submit,
        wanted: Wanted,
        decode: Callable[[list[int]], str],
        alone: Callable[[int], str | None],
        line: Line,
        told: Told,
        limit_s: float,
    ):
        """``decode`` and ``alone``: see :class:`ReplyText`."""
        self.prompt_rows: list[PromptRow] = []
        """Of the prompt's tokens from the second on, where prompt logprobs were asked for."""
        self.at: float | None = None
        """When the engine knew the tokens of the newest piece (``time.monotonic``)."""
        self._prompt_tokens, self._cached_tokens, self._completion_tokens = len(submit.prompt), 0, 0
        self._id, self._line, self._told, self._limit_s = submit.id, line, told, limit_s
        self._texts = [ReplyText(decode, wanted.stops, alone) for _ in range(submit.n)]
        self._living = set(range(submit.n))
        self._heard_at: dict[int, float] = {}
        self._asked_at = time.monotonic()
        self._kept: list[Word | ApiError] = []
        self._first: asyncio.Future[None] | None = None
        self._hearer: Hearer | None = None
        self._number = 0
        self._closed = False
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._late)

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._cached_tokens, self._completion_tokens)

    async def settled(self, patience_s: float) -> None:
        """Return once the engine has begun with it, or after ``patience_s``. ApiError where it is refused meanwhile."""
        if not self._kept:
            self._first = asyncio.get_running_loop().create_future()
            try:
                await asyncio.wait_for(self._first, patience_s)
            except TimeoutError:
                return
            finally:
                self._first = None
        error = self._refusal(self._kept[0])
        if error is not None:
            self._kept.clear()
            self.close()
            try:
                raise error
            finally:
                del error

    def listen(self, number: int, hearer: Hearer) -> None:
        """``hearer`` is told of all pieces from now on, as those of ``number``, and first of those that came already."""
        self._number, self._hearer = number, hearer
        kept, self._kept = self._kept, []
        for word in kept:
            self.hear(word)

    def hear(self, word: Word | ApiError) -> None:
        """What the engine says of this request, or why it says nothing any more. What goes wrong with it is the hearer's."""
        hearer = self._hearer
        if self._closed:
            return
        if hearer is None:
            self._kept.append(word)
            if self._first is not None and not self._first.done():
                self._first.set_result(None)
            return
        chosen = word if isinstance(word, Chosen) else None
        refusal = self._refusal(word) if chosen is None else None
        if refusal is not None:
            self._end(hearer, refusal)
            return
        try:
            piece = self._heard(word) if chosen is None else self._chosen(chosen) if chosen.reply in self._living else None
            if piece is not None:
                hearer.piece(self._number, piece)
        except Exception as error:
            self._end(hearer, error)
            return
        if not self._living:
            self._end(hearer, None)

    def _end(self, hearer: Hearer, error: Exception | None) -> None:
        self.close()
        self._living.clear()
        hearer.ended(self._number, error)

    def _refusal(self, word: Word | ApiError) -> ApiError | None:
        """Where the engine refuses, or cannot say anything."""
        if isinstance(word, Refused):
            self._living.clear()
            status = _STATUS.get(word.kind, 400)
            retry = None if status == 400 else 1
            return ApiError(status, word.message, code=_CODES.get(word.kind, word.kind), retry_after_s=retry)
        return word if isinstance(word, ApiError) else None

    def _heard(self, word: Word | ApiError) -> Piece | None:
        if isinstance(word, Over):
            return self._over(word) if word.index in self._living else None
        if isinstance(word, Began):
            self._prompt_tokens, self._cached_tokens = word.prompt_tokens, word.cached_tokens
            self._told.began(self.usage)
        if isinstance(word, PromptLogprobs):
            self.prompt_rows += word.rows
        return None

    def _chosen(self, word: Chosen) -> Piece:
        index, tokens = word.reply, word.tokens
        now, text, before = time.monotonic(), self._texts[index], self._heard_at.get(index)
        self._told.tokens(len(tokens), now - (self._asked_at if before is None else before), before is None)
        self._heard_at[index] = now
        self.at = word.at
        self._completion_tokens += len(tokens)
        new = text.add(tokens)
        if text.stop is None:
            return Piece(index, new, tokens, word.logprobs)
        self._living.discard(index)
        self._line.post(Cancel(self._id, index))
        return Piece(index, new, tokens, word.logprobs, "stop", text.stop)

    def _over(self, word: Over) -> Piece:
        if word.reason in ("error", "abort"):
            raise ApiError(500, word.message or "the engine gave this request up; ask again", code="engine_error")
        text = self._texts[word.index]
        self._living.discard(word.index)
        new = text.rest()
        end = None if word.stop_id is None or word.logprobs is None else (word.stop_id, word.logprobs)
        return Piece(word.index, new, finish_reason="stop" if text.stop is not None else word.reason, stop=text.stop, end=end)

    def _late(self) -> None:
        self.hear(ApiError(504, f"not answered within {self._limit_s:g} s; ask for fewer tokens, or later", code="timeout"))

    def close(self) -> None:
        """Nobody waits for this any more."""
        if self._closed:
            return
        self._closed, self._hearer = True, None  # no circle is left: each request would wait for Python to find it
        self._timer.cancel()
        self._line.leave(self._id)
        if self._living:
            self._line.post(Cancel(self._id))
        self._told.over()
