"""/v1/completions: a text or token ids go on, in OpenAI's dialect."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.runtime.serve.front.api_errors import wrong
from penstock.runtime.serve.front.asking import Asking, Piece, PromptRow, Wanted
from penstock.runtime.serve.front.callers import Caller
from penstock.runtime.serve.front.front_desk import Front, caller_of
from penstock.runtime.serve.front.sse import DONE, Mould, event, streamed, whole
from penstock.runtime.serve.front.token_texts import TokenTexts
from penstock.runtime.serve.routes.sampling_body import SamplingBody, usage_of
from penstock.runtime.serve.wire.messages import TopLogprobs

Prompt = TypeVar("Prompt")
USUAL_TOKENS = 16
"""Of a reply where ``max_tokens`` is not given, as OpenAI has it."""
LONG_TEXT = 20000
"""Characters from which on a request's texts are read as tokens beside the event loop."""
MOST_PROMPTS = 4096
"""That are looked at. How many are answered, the queue says."""
Prompts = Annotated[list[Prompt], Field(max_length=MOST_PROMPTS)]


class CompletionBody(SamplingBody):
    """What is asked of /v1/completions."""

    prompt: str | Prompts[str] | list[int] | Prompts[list[int]]
    """Texts, or token ids; special tokens in a text stay text."""
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    """The reply begins with the prompt; with logprobs, with those of its tokens."""
    logprobs: int | None = Field(None, ge=0, le=20)


def router(front: Front) -> APIRouter:
    """The route, for one server."""
    routes, texts = APIRouter(), front.texts

    @routes.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a text."""
        body.check(front)
        prompts = await _prompts(front, body)
        asked = _asked(front, body, prompts, caller_of(request))
        reply = _Reply(front, body, texts, asked, prompts)
        return await (streamed(front, asked, reply) if body.stream else whole(front, asked, _Whole(reply, body.logprobs is not None)))

    return routes


def _asked(front: Front, body: CompletionBody, prompts: Sequence[tuple[int, ...]], caller: Caller) -> list[Asking]:
    """One request a prompt; none where one of them is refused."""
    echoed = body.logprobs if body.echo and body.logprobs is not None else None
    wanted = Wanted(
        prompt=(),
        new_tokens=USUAL_TOKENS if body.max_tokens is None else body.max_tokens,
        sampling=body.sampled(front),
        stops=body.stops(),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.logprobs,
        prompt_logprobs=echoed,
        cache_salt=body.cache_salt or "",
        n=body.n or 1,
    )
    asked: list[Asking] = []
    try:
        for prompt in prompts:
            asked.append(front.ask(replace(wanted, prompt=prompt), caller))
    except BaseException:
        for asking in asked:
            asking.close()
        raise
    return asked


async def _prompts(front: Front, body: CompletionBody) -> list[tuple[int, ...]]:
    """As token ids. ApiError for what is none, or too many."""
    given = body.prompt
    if not isinstance(given, str) and not given:
        raise wrong("prompt", "an empty list; give a text, or token ids")
    several: list[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)
    limits = front.info.limits
    most = limits.get("rows", 1) + limits.get("queue", 0)
    if len(several) > most:
        raise wrong("prompt", f"{len(several)} prompts at once; this server takes {most}")
    if isinstance(several[0], str):
        texts, read, longest = several, front.talk.plain_ids, front.most_prompt_tokens
        long = sum(map(len, texts)) > LONG_TEXT
        return await front.beside(lambda: [read(text, longest) for text in texts]) if long else [read(text, longest) for text in texts]
    return [_known(one, front.info.vocab) for one in several]


def _known(prompt: list[int], vocab: int) -> tuple[int, ...]:
    absent = next((token for token in prompt if not 0 <= token < vocab), None)
    if absent is not None:
        raise wrong("prompt", f"{str(absent)[:20]} is no token; the model has 0 to {vocab - 1}")
    return tuple(prompt)


class _Reply:
    """One answer: choice ``k * n + i`` is reply i to prompt k."""

    def __init__(self, front: Front, body: CompletionBody, texts: TokenTexts, asked: Sequence[Asking], prompts: Sequence[tuple[int, ...]]):
        self._front, self._body, self._texts, self._asked, self._prompts = front, body, texts, asked, prompts
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": front.model,
        }
        self.count = len(asked) * (body.n or 1)
        self._offset = [0] * self.count
        self._begun = [False] * self.count
        self._moulds: dict[int, Mould] = {}
        """Of each choice that has begun, where events have text and nothing else."""

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def add(self, number: int, piece: Piece) -> bytes:
        """The event of one piece of the reply to prompt ``number``; none where it has nothing to say."""
        choice = self.choice(number, piece)
        mould = self._moulds.get(choice)
        if mould is not None and piece.finish_reason is None:
            return mould.event(piece.text) if piece.text else b""
        text, logprobs = self.told(choice, piece)
        if not text and not logprobs and not piece.finish_reason:
            return b""
        if self._body.logprobs is None and piece.finish_reason is None and not self._body.counts_on:
            self._moulds[choice] = mould = Mould(self._data(choice, Mould.TEXT, None, None))
            return mould.event(text)
        return event(self._data(choice, text, logprobs, piece.finish_reason))

    def end(self) -> bytes:
        """What the reply cost, where it is asked, and that it is over."""
        return event(self.head | {"choices": [], "usage": self.usage()}) + DONE if self._body.with_usage else DONE

    def choice(self, number: int, piece: Piece) -> int:
        return number * (self._body.n or 1) + piece.index

    def _data(self, choice: int, text: str, logprobs: dict[str, list[Any]] | None, reason: str | None) -> dict[str, Any]:
        said = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self.head | {"choices": [said]} | self._body.usage_so_far(self.usage)

    def usage(self) -> dict[str, Any]:
        each = [asking.usage for asking in self._asked]
        return usage_of(sum(u.prompt_tokens for u in each), sum(u.cached_tokens for u in each), sum(u.completion_tokens for u in each))

    def told(self, choice: int, piece: Piece) -> tuple[str, dict[str, list[Any]] | None]:
        """Text and logprobs of a piece, behind those of the prompt where it is echoed."""
        wants = self._body.logprobs is not None
        rows: list[tuple[int, float | None, list[int], list[float]]] = []
        text = ""
        if self._body.echo and not self._begun[choice]:
            number = choice // (self._body.n or 1)
            text = self._front.vocabulary.text(list(self._prompts[number]))
            rows += _prompt_rows(self._prompts[number], self._asked[number].prompt_rows) if wants else []
        self._begun[choice] = True
        if wants:
            rows += [(token, *_parts(said)) for token, said in zip(piece.tokens, piece.logprobs or [], strict=True)]
            rows += [(piece.end[0], *_parts(piece.end[1]))] if piece.end is not None else []
        return text + piece.text, self._logprobs(choice, rows) if rows else None

    def _logprobs(self, choice: int, rows: Sequence[tuple[int, float | None, list[int], list[float]]]) -> dict[str, list[Any]]:
        told = _no_logprobs()
        for token, logprob, top, top_logprobs in rows:
            name = self._texts.text(token)
            told["tokens"].append(name)
            told["token_logprobs"].append(logprob)
            likeliest = {self._texts.text(each): value for each, value in zip(reversed(top), reversed(top_logprobs), strict=True)}
            told["top_logprobs"].append(None if logprob is None else likeliest)
            told["text_offset"].append(self._offset[choice])
            self._offset[choice] += len(name)
        return told


class _Whole:
    """The same as one document."""

    def __init__(self, reply: _Reply, logprobs: bool):
        self._reply = reply
        self._texts, self._reasons = [""] * reply.count, ["length"] * reply.count
        self._logprobs = [_no_logprobs() if logprobs else None for _ in range(reply.count)]

    def gather(self, number: int, piece: Piece) -> None:
        choice = self._reply.choice(number, piece)
        text, logprobs = self._reply.told(choice, piece)
        self._texts[choice] += text
        self._reasons[choice] = piece.finish_reason or self._reasons[choice]
        kept = self._logprobs[choice]
        if kept is not None:
            for key, values in (logprobs or {}).items():
                kept[key] += values

    def document(self) -> dict[str, Any]:
        """The whole answer."""
        each = enumerate(zip(self._texts, self._logprobs, self._reasons, strict=True))
        choices = [
            {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason} for index, (text, logprobs, reason) in each
        ]
        return self._reply.head | {"choices": choices, "usage": self._reply.usage()}


def _no_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _parts(said: TopLogprobs) -> tuple[float, list[int], list[float]]:
    logprob, top, top_logprobs = said
    return logprob, top, top_logprobs


def _prompt_rows(prompt: Sequence[int], rows: Sequence[PromptRow]) -> list[tuple[int, float | None, list[int], list[float]]]:
    """The first token of a prompt has no logprob."""
    return [(prompt[0], None, [], []), *((token, logprob, top, values) for token, logprob, (top, values) in rows)]
