"""The keys that /v1/chat/completions and /v1/completions have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from penstock.runtime.serve.dialects.bodies import Body, at_most
from penstock.runtime.serve.front.api_errors import wrong
from penstock.runtime.serve.front.front_desk import Front
from penstock.runtime.serve.wire.messages import Sampled

MOST_STOPS = 16
MOST_BIASES = 1024

Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    """What a stream says besides."""

    include_usage: bool | None = None
    """One more event before the last, with the usage."""
    continuous_usage_stats: bool | None = None
    """Each event with a choice has the usage so far, too."""
    include_obfuscation: bool | None = None
    """Taken, and nothing is obfuscated."""


class SamplingBody(Body):
    """How tokens are chosen, how many, and how they are sent. null is as if a key were left out."""

    model: str
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, at_most(MOST_BIASES)] = None
    user: str | None = None
    """Who the client's user is; taken, and of no effect."""
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """So many of the likeliest tokens; 0 or -1 is all."""
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    ignore_eos: bool | None = None
    """Stop tokens are said like others and end nothing."""
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    cache_salt: str | None = Field(None, max_length=256)
    """Requests of one salt share the KV of what they begin with alike."""

    def sampled(self, front: Front) -> Sampled:
        """For the engine. ApiError for a token that there is not."""
        return Sampled(
            temperature=self.temperature,
            top_k=None if self.top_k is None else max(0, self.top_k),
            top_p=None if self.top_p is None else max(self.top_p, 1e-6),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            seed=None if self.seed is None else self.seed % 2**63,
            logit_bias={_token(token, front): added for token, added in (self.logit_bias or {}).items()},
        )

    def stops(self) -> tuple[str, ...]:
        """Texts that end a reply."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MOST_STOPS:
            raise wrong("stop", f"{len(stops)} texts; {MOST_STOPS} are allowed")
        if not all(stops):
            raise wrong("stop", "an empty text ends every reply; leave it out")
        return tuple(stops)

    def check(self, front: Front) -> None:
        """ApiError for another model, and for keys that contradict each other."""
        front.check_model(self.model)
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "only for a stream; say stream=true, or leave it out")

    def in_force(self, front: Front) -> dict[str, Any]:
        """What holds for the reply, where a response says it."""
        own = front.vocabulary.generation
        greedy = not getattr(own, "do_sample", False)
        temperature = (0.0 if greedy else getattr(own, "temperature", None)) if self.temperature is None else self.temperature
        top_p = getattr(own, "top_p", None) if self.top_p is None else self.top_p
        return {
            "temperature": 1.0 if temperature is None else temperature,
            "top_p": 1.0 if top_p is None else top_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
        }

    @property
    def with_usage(self) -> bool:
        """Whether a stream says its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_on(self) -> bool:
        """Whether each event says the usage so far."""
        return self.with_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def usage_so_far(self, usage: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What an event with a choice says of ``usage``, where a stream says it at all."""
        if not self.with_usage or self.stream_options is None:
            return {}
        return {"usage": usage() if self.counts_on else None}


def _token(token: str, front: Front) -> int:
    number = int(token) if token.isascii() and token.isdigit() and len(token) < 12 else -1
    if not 0 <= number < front.info.vocab:
        raise wrong("logit_bias", f"{token[:20]!r} is no token; the model has 0 to {front.info.vocab - 1}")
    return number


def usage_of(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """As OpenAI writes it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
